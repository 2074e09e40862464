"""The version of this package, on the ground so that every room may tell it."""

__version__ = "0.1.0"
