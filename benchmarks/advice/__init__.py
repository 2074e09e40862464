"""Measure the adviser on programs with one defect each, and on healthy programs: ``python -m benchmarks.advice``."""
