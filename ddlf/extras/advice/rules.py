"""All rules there are. Pure."""

from __future__ import annotations

from ddlf.extras.advice.of_batches import BATCH
from ddlf.extras.advice.of_clusters import CLUSTER
from ddlf.extras.advice.of_data import DATA
from ddlf.extras.advice.of_fields import FIELDS
from ddlf.extras.advice.of_labels import LABELS
from ddlf.extras.advice.of_layers import LAYERS
from ddlf.extras.advice.of_losses import LOSSES
from ddlf.extras.advice.of_models import MODELS
from ddlf.extras.advice.of_outputs import OUTPUTS
from ddlf.extras.advice.of_runs import RUNS
from ddlf.extras.advice.of_samples import SAMPLES
from ddlf.extras.advice.of_training import TRAINING
from ddlf.extras.advice.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (*DATA, *SAMPLES, *LABELS, *OUTPUTS, *LAYERS, *MODELS, *FIELDS, *BATCH, *LOSSES, *TRAINING, *CLUSTER, *RUNS),
        key=lambda rule: ("DLMTCR".index(rule.id[0]), rule.id),
    )
)
"""In the order in which they are listed."""
