"""Training a model that is text: its block ``train``, its data, what is decided, the compiled model. Runs on master and workers."""
