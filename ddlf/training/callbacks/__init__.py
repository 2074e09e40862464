"""The user's callbacks on the master, and the checks of where callbacks can run."""
