"""Tries to break the weight ledger of peers: ``python -m tests.trials.weight_ledger [HISTORIES]``.

Random histories of joins, posts, lost answers, expiries, merges, new files, and crashes in the middle of a write, of
swaps and of rounds. ``tests/peers/histories.py`` says what must hold. ``tests/peers/test_ledger.py`` is the short form.
"""

import sys
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.peers.histories import Histories, RoundHistories

STEPS = 30
"""Steps of a history, each of one to six posts or of another event."""


def main(histories: int) -> None:
    """Run half of the histories with swaps and half with rounds. The first broken promise ends the trial."""
    how = settings(
        max_examples=max(1, histories // 2),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    for kind in (Histories, RoundHistories):
        begun, cpu = time.perf_counter(), time.process_time()
        run_state_machine_as_test(kind, settings=how)
        passed, used = time.perf_counter() - begun, time.process_time() - cpu
        print(f"{kind.__name__}: {how.max_examples:,} histories, {passed:.0f} s, {used:.0f} s of processor time")
    print("0 sets lost, doubled or unexplained")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
