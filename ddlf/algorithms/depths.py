"""How much of its step a layer makes by its depth: the first ones none, the last ones all. Runs on master and workers; knows no Keras."""

from collections.abc import Mapping
from math import pi, sin

from ddlf.errors import ConfigError

LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""What factors are rounded to."""


def factor(to_input: int, to_output: int, frozen: float) -> float:
    """Return what the step of a weight is multiplied with: 0 if ``r <= f``, else ``sin(pi/2 (r - f) / (1 - f))``, as the nearest of ``LEVELS``.

    Args:
        to_input: Longest path from an input to the weight.
        to_output: Longest path from it to an output; ``r = to_input / (to_input + to_output)``.
        frozen: f, in [0, 1]: 0 for all to be trained as ever, 1 for none.

    Raises:
        ConfigError: f is out of range.
    """
    if not 0 <= frozen <= 1:
        raise ConfigError(f"the frozen share of the depth must be from 0 to 1, got {frozen}")
    if frozen == 0:
        return 1.0
    r = to_input / (to_input + to_output)
    if r <= frozen or frozen == 1:
        return 0.0
    exact = sin(pi / 2 * (r - frozen) / (1 - frozen))
    return min(LEVELS, key=lambda level: abs(level - exact))


def factors(depths: Mapping[str, tuple[int, int]], frozen: float) -> dict[str, float]:
    """Return the factor of each layer by name, but for those that train as ever.

    Args:
        depths: Of each layer both of its longest paths.
        frozen: As of ``factor``.
    """
    found = {name: factor(*both, frozen) for name, both in depths.items()}
    return {name: one for name, one in found.items() if one != 1}
