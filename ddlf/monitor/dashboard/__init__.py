"""A page that shows a cluster and the run on it, live. See ``server``."""
