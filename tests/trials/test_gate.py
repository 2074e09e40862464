"""Run the short form of the gate trial, with the limits that do not depend on the machine."""

import json

from tests.processes import command


def test_gate_refuses_forged_workers_and_many_workers_join_during_a_flood():
    options = ("--greetings", "3000", "--sockets", "100", "--workers", "128", "--drips", "100")
    results = json.loads(command("tests.trials.gate", *options).stdout)
    assert results["greetings"]["let in"] == []
    assert len(results["greetings"]["kinds"]) == 8, "each kind of attack was tried"
    assert results["sockets"] == {"answers": {"REFUSED": 100}, "let in": []}
    assert (results["workers"]["places"], results["workers"]["swapped"]) == (128, 0)
