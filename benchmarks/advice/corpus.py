"""The list of all defects."""

from __future__ import annotations

from benchmarks.advice.of_clusters import CLUSTERS
from benchmarks.advice.of_data import DATA
from benchmarks.advice.of_labels import LABELS
from benchmarks.advice.of_models import MODELS
from benchmarks.advice.of_outputs import LOSSES, OUTPUTS
from benchmarks.advice.of_training import TRAINING

DEFECTS = (*OUTPUTS, *LOSSES, *LABELS, *DATA, *MODELS, *TRAINING, *CLUSTERS)
"""Defects of one kind differ in the program, or in the amount."""
