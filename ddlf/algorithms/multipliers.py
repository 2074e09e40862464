"""The values of the setting ``multipliers``: factors for the steps of layers.

Runs on master and workers, without Keras.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, pi, sin

from ddlf.errors import ConfigError

LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Precision of factors."""


def factor(to_input: int, to_output: int, frozen: float) -> float:
    """Return the factor of a step: 0 if ``r <= f``, else ``sin(pi/2 (r - f) / (1 - f))``, rounded to ``LEVELS``.

    Args:
        to_input: Length of the longest path from an input to the weight.
        to_output: Length of the longest path from the weight to an output; ``r = to_input / (to_input + to_output)``.
        frozen: ``f``, in [0, 1]. With 0 all layers train normally, with 1 none is trained.

    Raises:
        ConfigError: ``f`` is out of range.
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
    """Return by name the factor of each layer's steps, without the layers whose factor is 1.

    Args:
        depths: For each layer, the lengths of its longest paths from the input and to the output.
        frozen: ``f`` in ``factor``: the share of the model that is not trained, in [0, 1].
    """
    by_layer = {name: factor(*depth, frozen) for name, depth in depths.items()}
    return {name: value for name, value in by_layer.items() if value != 1}


@dataclass(frozen=True, slots=True)
class Freeze:
    """Freeze the first layers, and let the layers after them make shorter steps.

    Args:
        shares: ``f`` in each part of the run. The parts are equally long.

    Raises:
        ConfigError: There are no shares, or a share is out of range.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError(f"shares must be from 0 to 1, got {', '.join(map(str, self.shares)) or 'none'}")

    def __str__(self) -> str:
        return MULTIPLIERS.text(self)

    @property
    def family(self) -> "Multiplied":
        """The object that reads this rule from text."""
        return MULTIPLIERS


@dataclass(frozen=True, slots=True)
class ByName:
    """Multiply the steps of some layers or weights, given by their names, by factors.

    Args:
        factors: Pairs of a name and a factor, each factor 0 or more.

    Raises:
        ConfigError: There are no factors, a factor is out of range, or a name is given twice.
    """

    factors: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.factors or len(dict(self.factors)) < len(self.factors):
            raise ConfigError("each layer needs one factor")
        for name, factor in self.factors:
            if not name or not (isfinite(factor) and factor >= 0):
                raise ConfigError(f"the factor of {name!r} must be finite and 0 or more, got {factor}")

    def __str__(self) -> str:
        return MULTIPLIERS.text(self)

    @property
    def family(self) -> "Multiplied":
        """The object that reads this rule from text."""
        return MULTIPLIERS


class Multiplied:
    """Reads and writes the values of the setting ``multipliers``, which are rules of two kinds, like a ``Family``."""

    kind = "multipliers"

    def __str__(self) -> str:
        return "freeze:0.75, freeze:0.75,0.5,0 or layer=0.1,other/bias=2"

    def read(self, text: str) -> Freeze | ByName:
        """Return the rule that a text describes.

        Raises:
            ConfigError: The text does not name a rule.
        """
        name, colon, shares = text.strip().partition(":")
        try:
            if name == "freeze" and colon:
                return Freeze(tuple(float(share) for share in shares.split(",")))
            pairs = [item.rpartition("=") for item in text.split(",")]
            return ByName(tuple((layer.strip(), float(factor)) for layer, _, factor in pairs))
        except ConfigError as error:
            raise ConfigError(f"multipliers {text!r}: {error.message}", hint=f"write {self}") from None
        except ValueError:
            raise ConfigError(f"{text!r} is not a value of multipliers", hint=f"write {self}") from None

    def normalized(self, rule: Freeze | ByName) -> Freeze | ByName:
        """Return a rule in its usual form: the form that it has when it is read from its own text."""
        return self.read(self.text(rule))

    def text(self, rule: Freeze | ByName) -> str:
        """Return the text that describes a rule."""
        if isinstance(rule, Freeze):
            return f"freeze:{','.join(f'{share:g}' for share in rule.shares)}"
        return ",".join(f"{name}={factor:g}" for name, factor in rule.factors)


MULTIPLIERS = Multiplied()
"""Every rule by name."""
