"""Template processes that all tests share: the executors of their workers are forks of a template.

One template has imported Keras, which takes seconds of processor time. The other one has imported the modules that each
executor needs, which takes half a second. Without templates, each worker would repeat these imports. ``tests/worker/``,
``tests/cluster/launch/test_local.py`` and every test that starts a command test clusters and daemons without them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ddlf.cluster.launch.local import SET_BY_IMPORTS
from ddlf.training.roles import PRELOADED
from ddlf.worker.process import Template, child_environment

ALONE = {"PYTEST_CURRENT_TEST", *SET_BY_IMPORTS}
"""Environment variables without an effect on a worker."""


class Standing(Template):
    """A template that keeps running after a cluster has closed it."""

    @classmethod
    def bare(cls) -> Standing:
        """Start a template that has imported the modules that each executor needs."""
        self = cls.start(child_environment())
        assert isinstance(self, Standing)
        return self

    @classmethod
    def of_keras(cls) -> Standing:
        """Start a template that imports Keras."""
        self = cls.bare()
        self.begin_preload(PRELOADED).close()
        return self

    def kill(self) -> None:
        """Do nothing, because other tests use this template."""

    async def close(self) -> None:
        """Do nothing, because other tests use this template."""

    def end(self) -> None:
        """End the template process."""
        super().kill()

    def suits(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether forks of this template have this environment."""
        return _without(self.environment) == _without(environment)

    def instead(self, usual: Callable[[Sequence[str]], Template | None]) -> Callable[[Sequence[str]], Template | None]:
        """Return a replacement for ``ddlf.cluster.launch.local.start_template`` that prefers this template."""
        return lambda modules: self if self.suits(child_environment()) else usual(modules)


def _without(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in {*ALONE, "PYTHONDONTWRITEBYTECODE"}}
