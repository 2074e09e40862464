"""A Python peer that hides each of its samples: its steps are clipped and noised, and it counts them itself. Runs on the peer.

The server and other peers get weights that follow from noised steps alone. Metrics have no noise, so the peer reports none,
and validates no set. It counts its steps on its disk before they leave, for each link, so it protects its samples whatever
the server does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ddlf.errors import ConfigError
from ddlf.peers.frames import Welcome
from ddlf.peers.keys import account_folder, holds
from ddlf.peers.model import Trained
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Offer
from ddlf.privacy.accountant import DELTA, Cost, check_delta
from ddlf.privacy.poisson import PoissonBatches
from ddlf.training.checkpoints.durable import explained
from ddlf.training.checkpoints.releases import RELEASES, ReleaseAccount, Terms

LOCK = "lock"
"""Name of the file that the program with the account holds."""
ME = "1"
"""The only member of the account of a peer."""
EPSILON_S = 60.0
"""Least seconds between two lines about epsilon, which takes half a second to compute."""
MOST_STEPS = 2**24
"""A budget is not searched beyond these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNoiseSettings:
    """How a peer hides its samples.

    Args:
        clip: Most norm of the gradient of a sample, over all trained weights.
        noise: Noise multiplier of each step.
        delta: The probability that the stated epsilon does not hold.
        budget: Largest epsilon of a sample: the peer leaves before a step would exceed it. None for no limit.
    """

    clip: float
    noise: float
    delta: float = DELTA
    budget: float | None = None


class SampleTrained(Trained):
    """A compiled Keras model with data, trained by steps that hide single samples. It has no metrics.

    Args:
        model: The compiled model.
        data: One array of inputs and one of labels for training.
        noise: Clip and noise.

    Attributes:
        steps: Steps since the last call of ``counted``.

    Raises:
        ConfigError: Model, data or backend are not supported.
    """

    def __init__(self, model: Any, data: Mapping[str, Any], noise: SampleNoiseSettings) -> None:
        from ddlf.training.slot.sample_noise import NoisedSteps

        if not all(isinstance(data[name], np.ndarray) for name in ("x_train", "y_train")):
            raise ConfigError(
                "--privacy-unit sample needs one array of inputs and one of labels",
                hint="train a model with one input and one output",
            )
        super().__init__(model, data, 0)
        self._noised = NoisedSteps(model, noise.clip, noise.noise)
        self.steps = 0

    def batch(self, size: int) -> None:
        """Make one step on a Poisson batch with this number of samples on average."""
        batches = self.batches(size)
        rows = batches.draw()
        self.steps += 1
        self._noised.step(self.data["x_train"][rows], self.data["y_train"][rows], batches.expected)

    def batches(self, size: int) -> PoissonBatches:
        """Return the batches that are drawn. Held-out samples are in none of them, so they do not make epsilon smaller."""
        return PoissonBatches(samples=self.samples, batch_size=size)

    def counted(self) -> int:
        """Return the number of steps since the last call."""
        steps, self.steps = self.steps, 0
        return steps


class SamplePeer(Peer):
    """A peer whose steps hide single samples. ``Peer`` describes the other arguments.

    Args:
        how: Clip, noise, delta and budget.
    """

    trained: SampleTrained

    def __init__(self, *args: Any, how: SampleNoiseSettings, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.how = how
        self._account: ReleaseAccount | None = None
        self._lock_file: BinaryIO | None = None  # the lock of the account
        self._left: int | None = None  # steps that the budget allows; None without
        self._shown_epsilon_at = 0.0

    @property
    def account(self) -> ReleaseAccount:
        """The account of this link's steps, after ``join`` has opened it."""
        assert self._account is not None
        return self._account

    def _check_earlier_posts(self) -> None:
        """Do nothing: ``_read`` compares the server's number with the account."""

    def _read(self, welcome: Welcome) -> None:
        super()._read(welcome)
        if welcome.number and not self.account.accountant.releases:
            raise ConfigError(
                "earlier posts with this link are not in the account of this machine, so no epsilon holds for all of them",
                hint="ask for a new link",
            )

    def _take_model(self, trained: Trained, offer: Offer) -> None:
        if self.plan.mechanism is not None:
            raise ConfigError(
                "the server's plan already has noise, which hides all of your samples together",
                hint="join without --privacy-unit sample, or ask its owner for a training without --clip and --noise",
            )
        check_delta(self.how.delta, trained.samples)
        super()._take_model(SampleTrained(trained.model, trained.data, self.how), offer)
        self._account = self._open_account()
        self._left = self._allowed_steps()

    def _open_account(self) -> ReleaseAccount:
        folder = account_folder(self._link)
        with explained(folder, "begin the account of releases in"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = (folder / LOCK).open("ab")
        if not holds(self._lock_file):
            raise ConfigError(
                "another program here trains with this link and --privacy-unit sample, and an account is for one of them",
                hint="wait until it has ended, or ask for another link",
            )
        terms = Terms(unit="sample", clip=self.how.clip, delta=self.how.delta)
        if (folder / RELEASES).exists():
            return ReleaseAccount.resume(folder, terms, self.how.budget)
        return ReleaseAccount.begin(folder, terms, self.how.budget)

    def _cost(self, steps: int) -> Cost:
        return self.trained.batches(self.plan.batch_size).cost_of_steps(ME, self.how.noise, steps)

    def _allowed_steps(self) -> int | None:
        """Return how many steps the budget allows; None without a budget.

        Raises:
            BudgetSpent: It allows none.
        """
        if self.how.budget is None:
            return None
        self.account.check(self._cost(1))
        low, high = 1, 2
        while high < MOST_STEPS and not self.account.spent(self._cost(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.account.spent(self._cost(middle)) else (middle, high)
        return low

    def _facts_for_people(self, welcome: Welcome) -> str:
        return f"{super()._facts_for_people(welcome)}; each step hides single samples"

    def _may_train(self) -> bool:
        if self._left is None or self._left > 0:
            return True
        if not self._leaves_at:
            self._say(f"budget    another step would make epsilon more than {self.how.budget:g}; the peer leaves")
            self.leave()
        return False

    def _step(self, *, trains: bool) -> None:
        before = self.updates
        super()._step(trains=trains)
        if self._left is not None:
            self._left -= self.updates - before

    def _post(self) -> None:
        self._count()
        super()._post()

    def _break(self, reason: str, hint: str = "") -> None:
        self._count()  # it tells about weights that have not been posted
        super()._break(reason, hint)

    def _count(self) -> None:
        if steps := self.trained.counted():
            self.account.count(self._cost(steps), has_left=True)  # the budget was checked before the steps

    def _validate(self, number: int, weights: Any) -> None:
        """Do nothing: a metric would tell without noise."""

    def _training_facts(self, loss: float) -> str:
        return f"clip {self.how.clip:g}, noise {self.how.noise:g}"

    def _show_last_post(self) -> None:
        super()._show_last_post()
        if self._shown_epsilon_at + EPSILON_S <= time.monotonic():
            self._tell()

    def _tell(self) -> None:
        self._shown_epsilon_at = time.monotonic()
        if self._account is not None and (epsilon := self._account.accountant.epsilon(ME)):
            delta = self.how.delta
            self._say(f"epsilon   {epsilon:.4g} at delta {delta:g}, of a single sample, by all posts with this link")

    def close(self) -> None:
        """End the connection, and say the epsilon of a sample."""
        self._shown_epsilon_at = math.inf  # once is enough
        super().close()
        self._tell()
        if self._lock_file is not None:
            self._lock_file.close()
