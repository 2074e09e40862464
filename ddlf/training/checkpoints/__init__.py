"""Folders of checkpoints: what is in them, how it gets to the disk, and whose they are. Knows nothing of training."""
