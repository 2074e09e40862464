"""Data sets as files at a place that all machines can reach: a folder with partition files and one manifest. Runs on all machines."""
