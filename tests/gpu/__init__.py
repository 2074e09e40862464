"""Tests with a real card, for one backend of Keras at a time. They run only with ``scripts/test --gpu``."""
