"""The seam between a run and a training with peers: weights from outside become the run's, between two commits.

Runs on the master. ``ddlf.peers.cluster`` has the object. A run knows only the interface here.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Protocol

from ddlf.algorithms.weights import Weights
from ddlf.training.context import App
from ddlf.training.progress import Progress
from ddlf.training.spec import RunSpec

CLASS = "ddlf.peers.cluster:ClusterPeer"
STATE = "peer"
"""Name of its arrays in the state of a run, which each checkpoint contains."""


class Outside(Protocol):
    """A run's membership in a training with peers."""

    @property
    def needs_weights(self) -> bool:
        """Whether the next commit will probably post or take a set, so that the master must have the weights."""

    @property
    def over(self) -> str:
        """Why the training of all peers is over; empty while it is not."""

    async def join(self) -> None:
        """Connect, and put the weights that the run begins with into its progress.

        Raises:
            DDLFError: The server cannot be reached, refuses the run, or has another model.
        """

    async def exchanged(self, weights: Weights | None) -> Weights | None:
        """Count a commit, post its weights if it is time, and take what the server has sent.

        Args:
            weights: The weights after the commit; None if only workers have them.

        Returns:
            The weights to continue with: the same object if nothing came.
        """

    async def leave(self, weights: Weights) -> bool:
        """Say goodbye after a last post. Return whether this has changed the state of the run."""

    async def close(self) -> None:
        """End the connection. Safe to call again."""


def outside(link: str | None, app: App, spec: RunSpec, progress: Progress, evaluate: Any) -> Outside | None:
    """Return the run's membership in the training of a link; None without a link."""
    return None if link is None else resolve_name(CLASS)(link, app, spec, progress, evaluate)
