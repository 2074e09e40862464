"""The exchange that is likely to be the fastest for a run."""
