"""Workers for synchronous programs."""
