"""Test your own apps."""
