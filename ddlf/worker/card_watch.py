"""Watches the cards of one worker by NVML: whether they still answer, and how busy and warm they are. Runs in daemons.

NVML can hang together with a card, so a separate thread asks it. A daemon without cards starts no thread, and loads no
library.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddlf.worker.cards import FELL_OFF, NEEDS_RESET, NOT_FOUND_CARD, Card, Loss

LOOK_S = 2.0
"""Seconds between two looks at the cards."""
ANSWER_S = 30.0
"""A card counts as hanging after these seconds without an answer of NVML, if no master says how long it waits."""
XID_EVENTS = 8
"""NVML's number for the events of critical Xids, the driver's error numbers."""
TIMEOUT = 10
"""Error of NVML: no event has come."""
FATAL = {
    48: "has a memory error that cannot be corrected",
    62: "has stopped its internal processor",
    74: "has lost its NVLink",
    79: "has fallen off the bus",
    95: "has a memory error that is not contained",
    119: "does not answer its driver",
    120: "does not answer its driver",
    154: "must be reset",
}
"""Xids that leave a card unusable. Others, such as 13 and 31, are faults of the program."""
LOST = {
    FELL_OFF: "has fallen off the bus",
    NEEDS_RESET: "must be reset",
    NOT_FOUND_CARD: "is not there any more",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a card at a moment. None stands for a value that the card does not report.

    Args:
        number: Its number in ``nvidia-smi``.
        name: The product.
        memory: Used bytes of its memory.
        total: All bytes of its memory.
        utilisation: Percent of the time in which it computes.
        watts: Its power.
        celsius: Its temperature.
    """

    number: str
    name: str
    memory: int
    total: int
    utilisation: int | None = None
    watts: float | None = None
    celsius: int | None = None


class CardWatch:
    """Looks at cards in turns, on a thread.

    Args:
        cards: The cards.

    Attributes:
        readings: The newest reading of each card.
        problem: Why NVML cannot read the cards at the moment, although none is lost; empty if it can.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self.readings: tuple[Reading, ...] = ()
        self.problem = ""
        self._cards = tuple(cards)
        self._loss: Loss | None = None
        self._question: tuple[Card, float] | None = None  # a card whose answer is awaited, and since when
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        # Python must not wait for this thread at its end: NVML may never return.
        threading.Thread(target=self._watch, name="ddlf cards", daemon=True).start()

    def stop(self) -> None:
        """End the thread, unless NVML hangs."""
        self._stopped.set()

    def loss(self, patience_s: float | None = None) -> Loss | None:
        """Return the lost card and the reason; None while all cards work.

        Args:
            patience_s: A card counts as hanging after these seconds without an answer.
        """
        question, patience = self._question, patience_s or ANSWER_S
        if self._loss is None and question is not None and time.monotonic() - question[1] > patience:
            self._loss = Loss(question[0], f"hangs: it has not answered for {patience:g} s")
        return self._loss

    def _watch(self) -> None:
        import pynvml

        events = None
        while self._loss is None:
            try:
                if events is None:
                    pynvml.nvmlInit()  # this may take seconds for each card
                    events = _listen(pynvml, self._cards)
                self._look(pynvml, events)
                self.problem = ""
            except pynvml.NVMLError as error:  # perhaps the driver is being replaced: this costs no worker
                self._question, self.problem = None, f"NVML cannot read the cards: {error}"
            if self._stopped.wait(LOOK_S):
                return

    def _ask(self, card: Card) -> None:
        self._question = card, time.monotonic()

    def _look(self, nvml: Any, events: Any) -> None:
        readings = []
        for card in self._cards:
            self._ask(card)
            try:
                readings.append(read(nvml, card))
            except nvml.NVMLError as error:
                if error.value not in LOST:
                    raise
                self._loss = Loss(card, f"{LOST[error.value]}, as NVML reports")
                return
        self._ask(self._cards[0])
        for uuid, xid in _xids(nvml, events):
            card = next((card for card in self._cards if card.uuid == uuid), self._cards[0])
            if xid in FATAL:
                self._loss = Loss(card, f"{FATAL[xid]} (Xid {xid})")
        self._question = None
        self.readings = tuple(readings)


def read(nvml: Any, card: Card) -> Reading:
    """Ask NVML for the state of a card.

    Raises:
        NVMLError: The card is lost, or NVML does not work.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(card.uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def value_or_none(ask: Any) -> Any:
        try:
            return ask()
        except nvml.NVMLError as error:
            if error.value in (FELL_OFF, NEEDS_RESET):
                raise
            return None  # an instance of a divided card does not report it

    watts = value_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return Reading(
        number=card.number,
        name=card.name,
        utilisation=value_or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        memory=int(memory.used),
        total=int(memory.total),
        watts=None if watts is None else watts / 1000,
        celsius=value_or_none(lambda: int(nvml.nvmlDeviceGetTemperature(handle, 0))),
    )


def _listen(nvml: Any, cards: Sequence[Card]) -> Any:
    """Return NVML's set of events for the Xids of these cards."""
    events = nvml.nvmlEventSetCreate()
    for card in cards:
        with contextlib.suppress(nvml.NVMLError):  # an instance of a divided card has no events
            nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByUUID(card.uuid), XID_EVENTS, events)
    return events


def _xids(nvml: Any, events: Any) -> Iterator[tuple[str, int]]:
    """Yield the unique name of the card and the number of each Xid that has come."""
    while True:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 0)
        except nvml.NVMLError:  # no further event has come
            return
        uuid = nvml.nvmlDeviceGetUUID(event.device)
        yield (uuid.decode() if isinstance(uuid, bytes) else uuid), int(event.eventData)
