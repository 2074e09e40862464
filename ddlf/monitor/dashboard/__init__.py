"""A web page that shows a cluster and its run, live; ``server`` serves it."""
