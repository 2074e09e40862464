"""The workers of a run: they are brought in, get slots, and may come and go."""
