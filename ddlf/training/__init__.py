"""Train on a cluster: what runs on the master. One algorithm per file (``sync``, ``asynchronous``)."""
