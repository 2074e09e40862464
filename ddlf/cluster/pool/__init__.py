"""Workers for programs that are not async."""
