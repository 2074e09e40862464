"""The app of ``benchmarks.start``: it trains on the digits, and reports when its first task is sent."""

from __future__ import annotations

import json
import time
from typing import Any

from apps.digits_cnn import DigitsCNN
from ddlf.events import Event, SlotStarted


class Start(DigitsCNN):
    """A subclass of ``ddlf.IApp`` that prints when training begins."""

    def __init__(self, cluster: Any = None) -> None:
        super().__init__(cluster)
        take_off = self.subscribe(lambda event: began(event) and take_off())


def began(event: Event) -> bool:
    """Print the time of the first task; return whether this was it."""
    if first := isinstance(event, SlotStarted):
        print(json.dumps({"began": time.time()}), flush=True)
    return first
