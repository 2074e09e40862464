"""Lists all rules of the adviser, in the order of the documentation. Pure."""

import itertools

from ddlf.extras.advice.rule import Rule
from ddlf.extras.advice.rules import cluster, data, labels, model, run, training

MODULES = (data, labels, model, training, cluster, run)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (value for value in itertools.chain(*(vars(module).values() for module in MODULES)) if isinstance(value, Rule)),
        key=lambda rule: ("DLMTCR".index(rule.id[0]), rule.id),
    )
)
