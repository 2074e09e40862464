"""The worker's side: a daemon that always answers, and an executor that runs user code.

Runs on every worker's machine.
"""
