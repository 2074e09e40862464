"""The terminal: ``ddlf`` and ``ddlf-worker``. Imports what a command needs when it needs it; ``--help`` imports nothing of weight."""
