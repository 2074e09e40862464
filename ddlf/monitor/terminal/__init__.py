"""What becomes of events: knows them and nothing else of a run."""
