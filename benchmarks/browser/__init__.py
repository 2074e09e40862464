"""Benchmarks of the engine that trains in browsers."""
