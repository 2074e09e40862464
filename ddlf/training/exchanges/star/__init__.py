"""The star exchange: updates go to the master, which merges them."""
