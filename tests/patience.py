"""How long a test waits for what has to happen."""

PATIENCE_S = 120
"""Only what hangs takes so long, also on a slow machine that does other things beside: whoever waits to the end of it has failed."""
