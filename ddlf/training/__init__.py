"""Training on a cluster: the modules of the master. Each strategy has its file (``sync``, ``asynchronous``)."""
