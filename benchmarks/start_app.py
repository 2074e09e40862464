"""The app that ``benchmarks.start`` runs: the digits, and when their first task is sent."""

from __future__ import annotations

import json
import time

from apps.digits_cnn import DigitsCNN
from ddlf.record import TrainingEvent


class Start(DigitsCNN):
    """A subclass of ``ddlf.IApp`` that says when training begins."""

    began = 0.0

    def on_event(self, event: TrainingEvent) -> None:
        """Print the time of the first task."""
        if event.kind == "start" and not self.began:
            self.began = time.time()
            print(json.dumps({"began": self.began}), flush=True)
