"""Downpour SGD: replicas push gradients to servers that keep ranges of the weights."""
