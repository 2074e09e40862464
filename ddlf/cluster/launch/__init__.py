"""Launchers: each starts the workers of a cluster in its own way, such as on this machine or with Slurm. Runs on the
master.
"""
