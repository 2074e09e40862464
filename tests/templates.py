"""Processes of which the executors of all tests' workers are forks: one has imported Keras, one only what each executor needs.

The first import takes seconds of a processor, the second half of one, and each worker would repeat it. That clusters and
daemons do without is tried in ``tests/worker/``, ``tests/cluster/launch/test_local.py`` and by every test that starts a command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ddlf.cluster.launch.local import SET_BY_IMPORTS
from ddlf.training.roles import PRELOADED
from ddlf.worker.process import Template, child_environment

ALONE = {"PYTEST_CURRENT_TEST", *SET_BY_IMPORTS}
"""Variables that make no difference to a worker."""


class Standing(Template):
    """A template that stays when a cluster lets go of it."""

    @classmethod
    def bare(cls) -> Standing:
        """Start one that imports what each executor needs."""
        self = cls.start(child_environment())
        assert isinstance(self, Standing)
        return self

    @classmethod
    def of_keras(cls) -> Standing:
        """Start one that imports Keras."""
        self = cls.bare()
        self.begin_preload(PRELOADED).close()
        return self

    def kill(self) -> None:
        """It stays."""

    async def close(self) -> None:
        """It stays."""

    def end(self) -> None:
        """End it."""
        super().kill()

    def suits(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Whether its forks have the same environment."""
        return _without(self.environment) == _without(environment)

    def instead(self, usual: Callable[[Sequence[str]], Template | None]) -> Callable[[Sequence[str]], Template | None]:
        """What takes the place of ``ddlf.cluster.launch.local.start_template``."""
        return lambda modules: self if self.suits(child_environment()) else usual(modules)


def _without(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in {*ALONE, "PYTHONDONTWRITEBYTECODE"}}
