"""Tests of bad inputs. Each error names the object, the wrong value, the expected form and the remedy."""
