"""The samples of each slot in a round, and partition files."""
