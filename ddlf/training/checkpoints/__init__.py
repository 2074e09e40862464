"""Folders of checkpoints: contents, durable writing, and ownership. This code does not depend on training."""
