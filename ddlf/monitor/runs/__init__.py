"""Run folders, which can be listed, compared and reported, and external trackers. Runs on the master, as sinks."""
