"""Try to break the weight ledger of peers: ``python -m tests.trials.weight_ledger [HISTORIES]``.

A random history has joins, posts, lost answers, expiries, merges, new files, and crashes during a write. Half of the
histories use swaps, the other half use rounds. ``tests/peers/histories.py`` checks the promises.
``tests/peers/test_ledger.py`` is the short form.
"""

import sys
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.peers.histories import Histories, RoundHistories

STEPS = 30
"""Number of steps of a history. A step is one to six posts, or another event."""


CHUNK = 500
"""Number of histories for each line of output."""


def main(histories: int) -> None:
    """Run histories of swaps and of rounds in turn. The first broken promise ends the trial."""
    how = settings(
        max_examples=CHUNK,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    for done in range(0, histories, 2 * CHUNK):
        for kind in (Histories, RoundHistories):
            run_state_machine_as_test(kind, settings=how)
        print(f"{done + 2 * CHUNK:,} histories, {time.process_time():.0f} s of processor time", flush=True)
    print("0 sets lost, doubled or unexplained")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
