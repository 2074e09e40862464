"""Stands in for ``pynvml``, the Python package of NVIDIA's management library, on a machine without a card.

``FAKE_NVML`` names a file of JSON with the cards. A test writes this file as ``pynvml.py`` into a folder of PYTHONPATH, so
the processes of workers find it, too. Texts are bytes, as in earlier releases of the package.
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def machine():
    with open(os.environ["FAKE_NVML"]) as file:
        return json.load(file)


def nvmlInit():
    if error := machine().get("error"):
        raise NVMLError(error)


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return machine().get("driver", "580.159.04").encode()


def nvmlSystemGetCudaDriverVersion():
    return machine().get("cuda", 13000)


def nvmlDeviceGetCount():
    return len(machine()["cards"])


def nvmlDeviceGetHandleByIndex(index):
    return machine()["cards"][index]


def nvmlDeviceGetUUID(handle):
    return handle["uuid"].encode()


def nvmlDeviceGetName(handle):
    return handle["name"].encode()


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=handle["memory"], free=handle.get("free", handle["memory"]))


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid) for pid in handle.get("processes", ())]


def nvmlDeviceGetMigMode(handle):
    if "instances" not in handle:
        raise NVMLError(3)  # not supported
    return (1, 1)


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index >= len(handle["instances"]):
        raise NVMLError(6)  # not found
    return handle["instances"][index]
