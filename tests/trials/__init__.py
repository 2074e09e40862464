"""Long runs that try to break promises, and what they need.

Each module is a script, ``python -m tests.trials.NAME``, whose exit code says whether the promises held; ``test_NAME.py`` runs its short form.
``machines`` and ``workers`` are what several of them need.
"""
