"""The master's side of a cluster: ``Cluster``, and a ``ProxyWorker`` for each worker, whose methods call it. Runs on
the master.
"""
