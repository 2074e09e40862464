"""Simulated links, without making one."""

import pytest

from benchmarks import network


@pytest.fixture
def shaped(monkeypatch):
    """The queues that are made or changed: device, action, and the remaining words."""
    commands = []
    monkeypatch.setattr(network, "run", lambda *words: commands.append(words) if words[0] == "tc" else None)
    return commands


def test_a_machine_drops_nothing_that_it_sends_itself_and_a_switch_does(shaped):
    with network.Network(2, "100mbit") as cables:
        cables.limit(1, "10mbit")
    ends = [(words[4], words[words.index("dev") + 1], words[-1]) for words in shaped]
    expected = []
    for how, machine in (("add", 0), ("add", 1), ("change", 1)):
        expected += [(how, "cable", "1s"), (how, f"port{machine}", "100ms")]
    assert ends == expected
    assert [words[words.index("rate") + 1] for words in shaped] == ["100mbit"] * 4 + ["10mbit"] * 2
