"""The settings of a run: their declarations and checks."""
