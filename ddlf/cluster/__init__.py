"""The master's side: a ``Cluster`` of ``ProxyWorker``s. Runs on the master."""
