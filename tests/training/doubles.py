"""A stand-in for Keras's callbacks on the master."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.training.progress import WeightsRef


class Doubles:
    """Doubles all weights after chosen epochs.

    Attributes:
        after: Numbers of these epochs, from 1.
    """

    final, stopped, need_weights = None, False, True
    after: Any = (2,)

    def __init__(self, app: Any, settings: Any) -> None:
        self.weights_were_remote: list[bool] = []
        app.weights_were_remote = self.weights_were_remote

    async def begin(self, progress: Any) -> None:
        self._progress = progress

    async def show(self) -> None:
        self.weights_were_remote.append(isinstance(self._progress.weights, WeightsRef))

    async def end_epoch(self) -> Any:
        if self._progress.round in self.after and self.need_weights:
            self._progress.weights = [np.asarray(w * 2, w.dtype) for w in self._progress.weights]
        return self._progress.records[-1]

    async def begin_epoch(self) -> None:
        pass

    async def end(self, whole: Any) -> None:
        pass

    def for_tests(self) -> None:
        return None

    @property
    def weights(self) -> Any:
        return self._progress.weights
