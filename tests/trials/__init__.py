"""Long runs that try to break the promises of DDLF, and their helpers.

Each trial is a script, ``python -m tests.trials.NAME``. Its exit code is 0 if the promises held. ``test_NAME.py`` runs its
short form. ``machines`` and ``workers`` are helpers of several trials.
"""
