"""A stand-in for ``pynvml``, the Python package of NVIDIA's management library, for machines without a card.

The environment variable ``FAKE_NVML`` names a JSON file with the cards. A test copies this module as ``pynvml.py`` into a
folder of PYTHONPATH, so that the processes of workers import it. Texts are bytes, like in earlier releases of ``pynvml``.
"""

import json
import os
import threading
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
    return _working(machine()["cards"][index])


def nvmlDeviceGetHandleByUUID(uuid):
    for card in machine()["cards"]:
        for handle in (card, *card.get("instances", ())):
            if handle["uuid"] == uuid:
                return _working(handle)
    raise NVMLError(6)  # not found


def _working(handle):
    if "error" in handle:
        raise NVMLError(handle["error"])
    return handle


def nvmlDeviceGetUUID(handle):
    return handle["uuid"].encode()


def nvmlDeviceGetName(handle):
    return handle["name"].encode()


def nvmlDeviceGetMemoryInfo(handle):
    if handle.get("hangs"):
        threading.Event().wait()
    free = handle.get("free", handle["memory"])
    return SimpleNamespace(total=handle["memory"], free=free, used=handle["memory"] - free)


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_reported(handle, "utilisation"))


def nvmlDeviceGetPowerUsage(handle):
    return 1000 * _reported(handle, "watts")


def nvmlDeviceGetTemperature(handle, sensor):
    return _reported(handle, "celsius")


def _reported(handle, name):
    if name not in handle:
        raise NVMLError(3)  # not supported
    return handle[name]


def nvmlEventSetCreate():
    return {}


def nvmlDeviceRegisterEvents(handle, kinds, events):
    events[handle["uuid"]] = set()  # its Xids that were reported


def nvmlEventSetWait_v2(events, milliseconds):
    for card in machine()["cards"]:
        if (reported := events.get(card["uuid"])) is not None and card.get("xid", 0) not in {0, *reported}:
            reported.add(card["xid"])
            return SimpleNamespace(device=card, eventData=card["xid"])
    raise NVMLError(10)  # timeout


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
