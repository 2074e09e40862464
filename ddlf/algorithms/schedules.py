"""The values of the setting ``schedule``: rules for the learning rate over a run. Runs on master and workers.

A rule is written as ``warmup:0.05,cosine``. Its formula has an argument ``xp``, NumPy or ``keras.ops``, whose functions
it calls. So one formula can be tested with numbers, and compiled into the step of a model. This module does not import
Keras.
"""

import re
from dataclasses import dataclass
from math import floor, isfinite, pi
from typing import Any, Protocol

from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

MOST_WARMUP = 0.5
"""Maximum length of the warm-up, as a share of the run. Otherwise a run of one epoch would consist of its warm-up."""


def _check_share(**shares: float) -> None:
    for name, share in shares.items():
        if not (isfinite(share) and 0 <= share <= 1):
            raise ConfigError(f"{name} must be from 0 to 1, got {share}")


class Course(Protocol):
    """The interface of courses, which say how the learning rate changes after the warm-up."""

    def share(self, done: Any, xp: Any) -> Any:
        """Return the learning rate as a share of its highest value.

        Args:
            done: Finished share ``q`` of the steps after the warm-up, from 0 to 1; an array or a tensor.
            xp: Module of the functions: ``numpy`` or ``keras.ops``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Named):
    """Keep the learning rate at its highest value: ``1``."""

    def share(self, done: Any, xp: Any) -> Any:
        return xp.ones_like(done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Named):
    """Lower the learning rate along half a cosine: ``least + (1 - least) (1 + cos(pi q)) / 2``.

    Args:
        least: Final rate as a share of the highest rate, in [0, 1].

    Source:
        Loshchilov, Hutter 2017, arXiv:1608.03983.
    """

    least: float = 0.0

    def __post_init__(self) -> None:
        _check_share(least=self.least)

    def share(self, done: Any, xp: Any) -> Any:
        return self.least + (1 - self.least) * (1 + xp.cos(pi * done)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Named):
    """Lower the learning rate along a line: ``1 - (1 - least) q``. ``least`` is the same as in ``Cosine``."""

    least: float = 0.0

    def __post_init__(self) -> None:
        _check_share(least=self.least)

    def share(self, done: Any, xp: Any) -> Any:
        return 1 - (1 - self.least) * done


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Named):
    """Keep the highest rate while ``q <= until``, then lower it: ``1 - (1 - least) (q - until) / (1 - until)``.

    Args:
        until: Share of the steps after the warm-up that have the highest rate, in [0, 1).
        least: See ``Cosine``.
    """

    until: float = 0.5
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_share(least=self.least, until=self.until)
        if self.until == 1:
            raise ConfigError("until must be below 1, or the rate never falls")

    def share(self, done: Any, xp: Any) -> Any:
        fallen = xp.maximum(done - self.until, 0.0) / (1 - self.until)
        return 1 - (1 - self.least) * fallen


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts(Named):
    """Repeat the course ``Cosine`` in several cycles of equal length. In the last step of a cycle ``q`` is 1.

    Args:
        cycles: Number of cycles, 1 or more.
        least: See ``Cosine``.

    Source:
        Loshchilov, Hutter 2017, arXiv:1608.03983.
    """

    cycles: int = 3
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_share(least=self.least)
        if self.cycles < 1:
            raise ConfigError(f"cycles must be 1 or more, got {self.cycles}")

    def share(self, done: Any, xp: Any) -> Any:
        turns = done * self.cycles
        # Rounding may put the last step of a cycle after the end of the cycle.
        begun = xp.maximum(xp.ceil(turns - 1e-4) - 1, 0.0)
        return Cosine(least=self.least).share(xp.minimum(turns - begun, 1.0), xp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup(Named):
    """Raise the learning rate along a line at the beginning: ``s / W`` at step ``s``.

    The warm-up takes ``max(1, floor(share * epochs))`` epochs, but at most half of the run.

    Args:
        share: Length of the warm-up as a share of the run's epochs, in [0, 0.5].

    Source:
        Goyal et al. 2017, arXiv:1706.02677.
    """

    share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.share <= MOST_WARMUP:
            raise ConfigError(f"share must be from 0 to {MOST_WARMUP}, got {self.share}")

    def steps(self, steps: float, epochs: int) -> float:
        """Return W, the number of warm-up steps, for a slot with these numbers of steps and epochs."""
        if not self.share:
            return 0.0
        warmup_epochs = max(1, floor(self.share * epochs + 1e-9))
        return min(warmup_epochs * steps / max(epochs, 1), MOST_WARMUP * steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rule of a learning rate over a run: it rises for W steps of warm-up, and then follows a course.

    Args:
        warmup: The warm-up.
        course: The course after the warm-up.
    """

    warmup: Warmup
    course: Any  # Course

    def __str__(self) -> str:
        return SCHEDULE.text(self)

    @property
    def family(self) -> "Schedules":
        """The object that reads this rule from text."""
        return SCHEDULE

    def share(self, step: Any, steps: Any, warm: Any, xp: Any) -> Any:
        """Return the learning rate at a step as a share of its highest value.

        Args:
            step: ``s``, the number of the step, from 1.
            steps: S, number of steps of the whole run; afterwards the rate stays constant.
            warm: W, the result of ``Warmup.steps``.
            xp: See ``Course``.
        """
        done = xp.clip((step - warm) / xp.maximum(steps - warm, 1e-9), 0.0, 1.0)
        return xp.where(step <= warm, step / xp.maximum(warm, 1e-9), self.course.share(done, xp))


PARTS: Family[Any] = Family(
    "schedule", warmup=Warmup, constant=Constant, cosine=Cosine, linear=Linear, hold=Hold, restarts=Restarts
)
"""The parts of schedules, by name."""


class Schedules:
    """Reads and writes the values of the setting ``schedule``, like a ``Family``.

    A value is a course of the learning rate, with or without a warm-up before it.
    """

    kind = "schedule"

    @property
    def names(self) -> list[str]:
        """The names of all courses and of the warm-up."""
        return PARTS.names

    def __str__(self) -> str:
        return f"one of {PARTS}, or one of them after warmup"

    def read(self, text: str) -> Rates:
        """Return the rule that a text describes, such as ``warmup:0.05,cosine:least=0.01``.

        Without a course, the rate stays constant after the warm-up.

        Raises:
            ConfigError: The text does not name a rule.
        """
        parts = re.split(rf",\s*(?=(?:{'|'.join(self.names)})\b)", text.strip())
        for part in parts:
            for word in part.split(",")[1:]:  # a misspelt name looks like a value of the rule before it
                if "=" not in word.partition(":")[0] and (suggestion := PARTS.suggestion(word.partition(":")[0])):
                    raise ConfigError(f"unknown schedule {word.strip()!r} in {text!r}{suggestion}")
        rules = [PARTS.read(part) for part in parts]
        is_warm = [isinstance(rule, Warmup) for rule in rules]
        if is_warm not in ([True], [False], [True, False]):
            raise ConfigError(f"schedule {text!r} is not one course behind at most one warm-up", hint=f"write {self}")
        warmup = rules[0] if is_warm[0] else Warmup(share=0.0)
        return Rates(warmup=warmup, course=Constant() if is_warm[-1] else rules[-1])

    def normalized(self, rule: Rates) -> Rates:
        """Return a rule in its usual form: the form that it has when it is read from its own text."""
        return self.read(self.text(rule))

    def text(self, rule: Rates) -> str:
        """Return the text that describes a rule, with all of its parameters."""
        warmup = [str(rule.warmup)] if rule.warmup.share else []
        return ",".join([*warmup, str(rule.course)])


SCHEDULE = Schedules()
"""The reader of the setting ``schedule``. ``PARTS`` has the rules by name."""
