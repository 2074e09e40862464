"""The samples of each slot in a round, partition files, and how often each sample was trained on."""
