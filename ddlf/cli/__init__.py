"""The commands ``ddlf`` and ``ddlf-worker``. A command imports its modules when it runs, so ``--help`` is fast."""
