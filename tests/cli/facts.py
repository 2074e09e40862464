"""Facts of a machine that is well, in which a test changes some."""

from typing import Any

GB = 10**9


def machine(**changes: Any) -> dict[str, Any]:
    """As ``ddlf.worker.machine.about`` returns them."""
    return {
        "ddlf": "0.1.0",
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
        "cores": 4,
        "memory": 16 * GB,
        "memory_free": 8 * GB,
        "disks": [{"folder": "/tmp", "size": 500 * GB, "free": 100 * GB}],
        **changes,
    }
