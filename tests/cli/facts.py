"""Facts of a healthy machine. A test changes some of them."""

from typing import Any

GB = 10**9


NO_CARDS = {
    "cards": [],
    "driver": "",
    "cuda": "",
    "problem": "",
    "do": "",
    "package": "tensorflow-cpu 2.21.0",
    "build_cuda": "",
    "extra": "tensorflow-gpu",
    "others": "",
    "mask": None,
    "seen": [],
    "wrong": "",
}


def with_cards(*cards: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return facts about cards in the form of ``ddlf.worker.cards.facts_of_cards``. JAX can use the cards."""
    return {
        **NO_CARDS,
        "cards": list(cards),
        "driver": "580.159",
        "cuda": "13.0",
        "package": "jax 0.10.2",
        "build_cuda": "12",
        "extra": "jax-gpu",
        "seen": [card["number"] for card in cards],
        **changes,
    }


def card(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the facts of a card with free memory."""
    facts = {"number": str(number), "uuid": f"GPU-{number}", "name": "Test Card", "processes": [], "lost": ""}
    return {**facts, "memory": 16 * GB, "free": 15 * GB, **changes}


def machine(**changes: Any) -> dict[str, Any]:
    """Return facts about a machine in the form of ``ddlf.worker.machine.machine_facts``."""
    return {
        "ddlf": "0.1.0",
        "source": "0123456789abcdef",
        "python": "3.11.7",
        "platform": "Linux",
        "host": "pc",
        "libraries": "/v/lib",
        "packages": {"tensorflow-cpu": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"},
        "unmet": [],
        "keras_backend": "tensorflow",
        "has_backend": True,
        "without_bytecode": [],
        "may_write_bytecode": True,
        "gpus": NO_CARDS,
        "cores": 4,
        "memory": 16 * GB,
        "memory_free": 8 * GB,
        "disks": [{"folder": "/tmp", "size": 500 * GB, "free": 100 * GB}],
        **changes,
    }
