"""Finds the cards of this machine: GPUs of NVIDIA, by their management library (NVML). Runs on both sides.

This file imports no framework, so it neither takes memory of a card nor delays a start. ``nvidia-ml-py`` is the Python
package of NVML. Without this package, or without a driver, a machine counts as one without cards, and ``CardInventory.problem``
says why if it has some. Cards of AMD and Apple are not found here: the framework alone uses them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.worker.lost_cards import lost_cards

MASK = "CUDA_VISIBLE_DEVICES"
"""Environment variable of CUDA with the cards that a process may use."""
NONE = "none"
"""The name that stands for no card at all."""
HIDDEN = ("", "-1", NONE, "nodevfiles")
"""Users and schedulers set the mask to one of these values to hide all cards."""
PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/version")
AMD = Path("/dev/kfd")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""The vendor's number on the PCI bus, and the beginning of the class of graphics cards."""
INSTALL = "python -m pip install nvidia-ml-py"
NOT_FOUND, NOT_LOADED, MISMATCH = 12, 9, 18
"""Errors of NVML: the library is missing, the driver does not run, or the two have different versions."""
FELL_OFF, NEEDS_RESET, NOT_FOUND_CARD = 15, 16, 6
"""Errors of NVML about one card: it has fallen off the bus, must be reset, or is not there."""
REPAIR = "reset it with nvidia-smi --gpu-reset, or restart the machine; then ddlf doctor tries it"


@dataclass(frozen=True, slots=True)
class Card:
    """A card of this machine, or a part of one (a MIG instance).

    Args:
        number: Its number in ``nvidia-smi``, such as ``"0"``. The second instance of card 0 has ``"0:1"``.
        uuid: Its unique name in CUDA.
        name: The product, for people.
        memory: Bytes of its memory.
        free: Free bytes of its memory.
        processes: Process ids of the programs that compute on it.
        lost: Why workers leave it alone since it was lost; empty if it works. Its memory is unknown then.
    """

    number: str
    uuid: str
    name: str
    memory: int
    free: int
    processes: tuple[int, ...] = ()
    lost: str = ""

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"


@dataclass(frozen=True, slots=True)
class Loss:
    """A card that was lost.

    Args:
        card: The card.
        reason: The reason, as the end of a sentence about the card.
    """

    card: Card
    reason: str

    def __str__(self) -> str:
        return f"the card {self.card} {self.reason}"


@dataclass(frozen=True, slots=True)
class CardInventory:
    """The cards of this machine.

    Args:
        cards: The cards, in the order of their numbers.
        driver: Version of the driver; empty without one.
        cuda: The latest CUDA version that this driver supports.
        problem: Why this machine's cards were not found; empty if they were, or if it has none.
        do: How to repair the problem.
    """

    cards: tuple[Card, ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""
    do: str = ""


def find_cards() -> CardInventory:
    """Ask NVML for the cards of this machine, whatever the mask of this process hides."""
    if importlib.util.find_spec("pynvml") is None:
        if not DRIVER.exists():
            return CardInventory()
        return CardInventory(problem="it has a driver of NVIDIA, but not the package that finds the cards", do=INSTALL)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _without_driver(error)
    try:
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
        cards, problems, lost = list[Card](), list[str](), lost_cards()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                instances = [*_cards_of(pynvml, index, pynvml.nvmlDeviceGetHandleByIndex(index), lost)]
                cards += instances
                if not instances:
                    problems.append(f"the card {index} is divided (MIG), but has no instance")
            except pynvml.NVMLError as error:
                if error.value not in (FELL_OFF, NEEDS_RESET):
                    raise
                problems.append(
                    f"the card {index} {'has fallen off the bus' if error.value == FELL_OFF else 'must be reset'}"
                )
        return CardInventory(
            tuple(cards),
            _text(pynvml.nvmlSystemGetDriverVersion()),
            f"{version // 1000}.{version % 1000 // 10}",
            " and ".join(problems),
            _repair(problems[0]) if problems else "",
        )
    except pynvml.NVMLError as error:
        return CardInventory(
            problem=f"NVML cannot read the cards: {error}", do="see dmesg for lines with NVRM, and restart it"
        )
    finally:
        pynvml.nvmlShutdown()


def _repair(problem: str) -> str:
    if "MIG" in problem:
        return "make one with nvidia-smi mig -cgi PROFILE -C, or end the division with nvidia-smi -mig 0"
    return "reset it with nvidia-smi --gpu-reset, or restart the machine"


def _cards_of(nvml: Any, index: int, handle: Any, lost: Mapping[str, str]) -> Iterator[Card]:
    """Yield a card, or its instances if it is divided."""
    is_divided = False
    with contextlib.suppress(nvml.NVMLError):  # older cards cannot be divided
        is_divided = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    if not is_divided:
        yield _card(nvml, str(index), handle, lost)
        return
    for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # there are fewer instances than the card could have
            handle_of_instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance)
            yield _card(nvml, f"{index}:{instance}", handle_of_instance, lost)


def _card(nvml: Any, number: str, handle: Any, lost: Mapping[str, str]) -> Card:
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    if uuid in lost:  # it may hang at any other question
        return Card(number, uuid, name, 0, 0, lost=lost[uuid])
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes: tuple[int, ...] = ()
    with contextlib.suppress(nvml.NVMLError):  # a container may not see them
        processes = tuple(int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Card(number, uuid, name, int(memory.total), int(memory.free), processes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _without_driver(error: Any) -> CardInventory:
    if error.value == MISMATCH:
        return CardInventory(
            problem="the driver of NVIDIA was updated, and the old one still runs", do="restart the machine"
        )
    if error.value not in (NOT_FOUND, NOT_LOADED):
        return CardInventory(
            problem=f"the driver of NVIDIA does not answer: {error}", do="see dmesg for lines with NVRM"
        )
    if not _has_card():
        return CardInventory()
    return CardInventory(
        problem="it has a card of NVIDIA, but no driver that runs",
        do="install the driver, as with: sudo ubuntu-drivers install; in a container: docker run --gpus all",
    )


def _has_card() -> bool:
    for folder in PCI.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((folder / name).read_text() for name in ("vendor", "class"))
            if vendor.startswith(NVIDIA) and kind.startswith(DISPLAY):
                return True
    return False


def cards_of_other_kinds() -> str:
    """Return a sentence about cards that DDLF does not hand out; empty if this machine has none of these."""
    if AMD.exists():
        return "AMD's (ROCm), which the framework takes by itself: DDLF neither finds nor hands them out"
    if sys.platform == "darwin":
        return "Apple's (Metal), which the framework takes by itself: DDLF neither finds nor hands it out"
    return ""


# -- names and masks --------------------------------------------------------------------------------------------------


def read_names(value: object, such_as: str = "[0] or [0, 1]") -> tuple[str, ...]:
    """Return the names of cards in a value of ``gpus``: a list such as ``[0, 1]``, a text such as ``"0,1"``, or
    ``"none"``.

    Args:
        value: The value.
        such_as: Valid values as the user writes them, for the error.

    Raises:
        ValueError: The value is another one, or a card is named twice.
    """
    parts = value.split(",") if isinstance(value, str) else value
    example = f"must name cards, such as {such_as}, or be none"
    if not isinstance(parts, list | tuple) or not parts or any(isinstance(part, bool) for part in parts):
        raise ValueError(f"{example}, got {value!r}")
    names = tuple(str(part).strip() for part in parts)
    for name in names:
        if not re.fullmatch(r"\d{1,3}(:\d{1,2})?|(GPU|MIG)-[\w/-]{1,80}|none", name):
            raise ValueError(f"{example}, got {value!r}")
        if names.count(name) > 1:
            raise ValueError(f"names the card {name} twice")
    if NONE in names and len(names) > 1:
        raise ValueError(f"is either none or names of cards, got {value!r}")
    return names


def visible_cards(cards: Sequence[Card], mask: str | None) -> tuple[Card, ...]:
    """Return the cards that a mask leaves, in its order. It has the numbers of ``nvidia-smi``.

    Args:
        cards: All cards of this machine.
        mask: The value of ``CUDA_VISIBLE_DEVICES``; None leaves all cards.

    Raises:
        ConfigError: The mask names a card that does not exist.
    """
    if mask is None:
        return tuple(cards)
    visible: list[Card] = []
    for part in mask.split(","):
        if part.strip().casefold() in HIDDEN:  # CUDA ignores all that follows
            break
        card = find_card(cards, part.strip())
        if card is None:
            raise ConfigError(
                f"{MASK}={mask} names the card {part.strip()}, which this machine does not have",
                hint=f"it has: {listed(cards)}",
            )
        if card not in visible:
            visible.append(card)
    return tuple(visible)


def named_cards(
    cards: Sequence[Card], names: Sequence[str], mask: str | None, *, together: bool = True
) -> tuple[Card, ...]:
    """Return the cards with these names.

    Args:
        cards: All cards of this machine.
        names: Names of cards.
        mask: The value of ``CUDA_VISIBLE_DEVICES``; None without one.
        together: Whether one process uses all of them.

    Raises:
        ConfigError: A card does not exist, is hidden by the mask, or is named twice; or the cards cannot be used together.
    """
    visible = visible_cards(cards, mask)
    chosen: list[Card] = []
    for name in names:
        instances = [card.number for card in cards if card.number.startswith(f"{name}:")]
        if instances:
            raise ConfigError(f"the card {name} is divided (MIG)", hint=f"name an instance: {', '.join(instances)}")
        card = find_card(cards, name)
        if card is None:
            raise ConfigError(f"this machine has no card {name}", hint=f"it has: {listed(cards) or 'none'}")
        if card not in visible:
            raise ConfigError(f"the card {card} is hidden by {MASK}={mask}", hint="change this variable, or unset it")
        if card in chosen:
            raise ConfigError(f"the card {card} is named twice", hint="name it once")
        if card.lost:
            raise ConfigError(f"the card {card} cannot be used, because it {card.lost}", hint=REPAIR)
        chosen.append(card)
    if together and len(chosen) > 1 and any(":" in card.number for card in chosen):
        raise ConfigError("a process can use only one instance of divided cards (MIG)", hint="name one")
    return tuple(chosen)


def find_card(cards: Sequence[Card], name: str) -> Card | None:
    """Return the card with a number or the beginning of a unique name. A divided card stands for its first instance."""
    for card in cards:
        if card.number == name or card.uuid == name:
            return card
    matches = [card for card in cards if card.uuid.startswith(name) and name.startswith(("GPU-", "MIG-"))]
    matches += [card for card in cards if card.number.startswith(f"{name}:")]
    return matches[0] if matches else None


def listed(cards: Sequence[Card]) -> str:
    """Return the cards as one text for people."""
    return ", ".join(map(str, cards))


# -- what the framework was built for ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """The framework that computes on the cards, as it is installed.

    Args:
        package: Name and version of the installed package, for people; empty if it is missing.
        cuda: The CUDA version that it was built for; empty if it computes on CPUs only.
        extra: The extra of DDLF that installs the one for cards; empty if there is none.
    """

    package: str = ""
    cuda: str = ""
    extra: str = ""


EXTRAS = {"tensorflow": "tensorflow-gpu", "jax": "jax-gpu", "torch": "torch"}
BUILD_FILES = {
    "tensorflow": ("python/platform/build_info.py", r"'cuda_version', '([\d.]+)'"),
    "torch": ("version.py", r"^cuda\b.*= '([\d.]+)'"),
}
"""The file with the version of CUDA that a framework was built for, and the pattern to find it. Reading the file takes less
than a millisecond, and importing the framework takes seconds."""
JAX_PLUGINS = tuple(f"jax-cuda{version}-plugin" for version in (12, 13, 14))


def build_of(backend: str) -> Build:
    """Return how the framework of a Keras backend is installed, without importing it."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(backend)
    if spec is None or spec.origin is None:
        return Build(extra=EXTRAS.get(backend, ""))
    cuda = ""
    if backend == "jax":
        installed = [name for name in JAX_PLUGINS if _version(name)]
        cuda = "".join(filter(str.isdigit, installed[-1])) if installed else ""
    elif backend in BUILD_FILES:
        name, pattern = BUILD_FILES[backend]
        with contextlib.suppress(OSError):
            match = re.search(pattern, (Path(spec.origin).parent / name).read_text(), re.MULTILINE)
            cuda = match[1] if match else ""
    return Build(_package(backend), cuda, EXTRAS.get(backend, ""))


def _package(backend: str) -> str:
    for name in (backend, f"{backend}-cpu"):
        if version := _version(name):
            return f"{name} {version}"
    return backend


def _version(distribution: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def facts_of_cards(backend: str, mask: str | None) -> dict[str, Any]:
    """Return facts about the cards of this machine as data, for ``ddlf doctor``.

    Args:
        backend: Name of the framework, as Keras calls it.
        mask: The value of ``CUDA_VISIBLE_DEVICES``; None without one.

    Returns:
        The fields of ``CardInventory``; ``package``, ``build_cuda`` and ``extra``, the fields of ``Build``; ``others``, a sentence
        about cards that DDLF does not hand out; ``mask``; ``seen``, the numbers of the cards that the mask leaves;
        ``wrong``, what is wrong with the mask; ``programs``, the program of each process that computes on a card.
    """
    inventory = find_cards()
    problem = ""
    visible: tuple[Card, ...] = ()
    try:
        visible = visible_cards(inventory.cards, mask) if inventory.cards else ()
    except ConfigError as error:
        problem = f"{error.message}; {error.hint}"
    build = build_of(backend)
    return {
        **asdict(inventory),
        "package": build.package,
        "build_cuda": build.cuda,
        "extra": build.extra,
        "others": cards_of_other_kinds(),
        "mask": mask,
        "wrong": problem,
        "seen": [card.number for card in visible],
        "programs": {str(pid): program_of(pid) for card in inventory.cards for pid in card.processes},
    }


def program_of(pid: int) -> str:
    """Return the name of the program of a process; empty if it is unknown, as that of another container."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
