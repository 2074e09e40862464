"""The master's side of a cluster: ``Cluster`` and its ``ProxyWorker``s. Runs on the master."""
