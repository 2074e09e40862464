"""Start workers. Runs on the master."""
