"""The adviser's corpus: programs with one defect each, healthy programs, and what advice finds in them. ``python -m benchmarks.advice``."""
