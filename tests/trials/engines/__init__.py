"""Trials of losses, notices and ends on real engines. See ``tests.trials.engines.__main__``."""
