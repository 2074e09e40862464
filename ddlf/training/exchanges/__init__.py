"""The exchanges, which turn the updates of a round into the next weights. Each has its own folder or file."""
