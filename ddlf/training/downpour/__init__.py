"""Downpour SGD: replicas push gradients to servers of slices of the weights."""
