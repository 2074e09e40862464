"""What is left of runs: their folders, which can be listed, compared and reported, and trackers of others. Runs on the master, by subscribing."""
