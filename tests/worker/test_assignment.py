"""Tests of the cards that a worker gets, and of the environment of its executor. A stand-in replaces NVML."""

import sys
from types import SimpleNamespace

import pytest

from ddlf.errors import ConfigError
from ddlf.worker import assignment as module
from ddlf.worker.assignment import (
    NO_WISH,
    Assignment,
    CardWish,
    cards_of_executor,
    count_of_workers,
    prepare_framework,
    spread,
    unused_cards,
    wish,
)
from tests.cards import GIB, card


def numbers(assigned):
    return [assigned_card.number for assigned_card in assigned.cards]


def test_worker_takes_the_first_card_that_has_no_worker(cards):
    first, second = Assignment.take(NO_WISH), Assignment.take(NO_WISH)
    assert (numbers(first), numbers(second)) == (["0"], ["1"])
    with pytest.raises(
        ConfigError, match=r"each card of this machine has a worker of DDLF already: 0 \(Test Card\), 1"
    ):
        Assignment.take(NO_WISH)
    first.release()
    assert numbers(Assignment.take(NO_WISH)) == ["0"]


def test_worker_with_a_mask_takes_all_of_it(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assigned = Assignment.take(NO_WISH)
    assert assigned.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-10000000-0000,GPU-00000000-0000"


def test_second_worker_gets_a_card_only_if_both_have_a_limit(cards):
    first = Assignment.take(CardWish(("0",)))
    for choice in (CardWish(("0",)), CardWish(("0",), GIB)):
        with pytest.raises(
            ConfigError, match=r"the card 0 \(Test Card\) has another worker of DDLF; name another card"
        ):
            Assignment.take(choice)
    first.release()
    sharing = [Assignment.take(CardWish(("0",), GIB)) for _ in range(2)]
    assert [numbers(assignment) for assignment in sharing] == [["0"], ["0"]]
    with pytest.raises(ConfigError, match="has another worker"):
        Assignment.take(CardWish(("0",)))
    assert numbers(Assignment.take(NO_WISH)) == ["1"]


def test_each_reason_why_cards_stay_unused_has_a_sentence(cards, monkeypatch):
    assert unused_cards() == []
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert "computes on CPUs only; python -m pip install 'ddlf[tensorflow-gpu]'" in unused_cards()[0]
    cards.has(error=18)
    assert unused_cards() == ["the driver of NVIDIA was updated, and the old one still runs; restart the machine"]
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    cards.has(card(0, error=15), card(1))
    assert unused_cards()[0].startswith("the card 0 has fallen off the bus; reset it")
    for mask in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert unused_cards() == []


def test_failed_assignment_keeps_no_card(cards):
    second = Assignment.take(CardWish(("1",)))
    with pytest.raises(ConfigError, match=r"the card 1 \(Test Card\) has another worker"):
        Assignment.take(CardWish(("0", "1")))
    assert numbers(Assignment.take(CardWish(("0",)))) == ["0"]
    second.release()


def test_executor_gets_mask_limit_and_growing_memory(cards):
    assigned = Assignment.take(CardWish(("1",), 4 * GIB))
    assert assigned.environment() == {
        "CUDA_VISIBLE_DEVICES": "GPU-10000000-0000",
        "DDLF_CARDS": '["1 (Test Card), at most 4.3 GB"]',
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "DDLF_GPU_MEMORY": str(4 * GIB),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2500",
    }


def test_variables_of_the_user_are_kept(cards, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    variables = Assignment.take(CardWish(("0",), 4 * GIB)).environment()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in variables
    assert variables["XLA_CLIENT_MEM_FRACTION"] == "0.2500"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in variables


def test_worker_without_cards_changes_no_variable(cards, monkeypatch):
    cards.has()
    assert Assignment.take(NO_WISH).environment() == {}
    cards.has(card(0))
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # the build for CPUs
    assert Assignment.take(NO_WISH).environment() == {}
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert Assignment.take(NO_WISH).environment() == {}


def test_none_hides_all_cards(cards):
    environment = Assignment.take(CardWish(("none",))).environment()
    assert environment == {"CUDA_VISIBLE_DEVICES": "", "DDLF_CARDS": "[]", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("choice", "backend", "sentence"),
    [
        (CardWish(("7",)), "jax", "this machine has no card 7; it has: 0"),
        (
            CardWish(("0",)),
            "tensorflow",
            r"gpus=0 has no effect: tensorflow-cpu .* computes on CPUs only; python -m pip",
        ),
        (CardWish(("0",)), "openvino", "gpus=0 has no effect: openvino.*choose another with KERAS_BACKEND"),
        (
            CardWish(("0",), 17 * GIB),
            "jax",
            r"gpu_memory is 18.3 GB, but the card 0 \(.*has 17.2 GB",
        ),
        (CardWish(("0",), 10**6), "jax", "gpu_memory must be at least 256MiB, got 1000000 bytes"),
        (CardWish(("none",), GIB), "jax", "gpu_memory has no effect with gpus=none"),
        (CardWish(None, GIB), "tensorflow", "gpu_memory has no effect without a card"),
    ],
)
def test_impossible_choice_of_cards_is_refused(cards, monkeypatch, choice, backend, sentence):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    if backend == "openvino":
        (cards.site / "openvino.py").write_text("")
    with pytest.raises(ConfigError, match=sentence):
        Assignment.take(choice)


def test_worker_gets_one_instance_of_a_mask_with_several(cards, monkeypatch):
    instances = [{"uuid": f"MIG-{name}", "name": "Test Card MIG 1g", "memory": 8 * GIB} for name in "ab"]
    cards.has(card(0, instances=instances))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    with pytest.raises(ConfigError, match=r"names 0:0 .*, 0:1 .*only one instance.*; name one .* --gpus MIG-a"):
        Assignment.take(NO_WISH)
    assert Assignment.take(CardWish(("MIG-b",))).environment()["CUDA_VISIBLE_DEVICES"] == "MIG-b"


def test_missing_cards_are_refused_with_the_reason(cards):
    cards.has(error=18)
    with pytest.raises(
        ConfigError, match=r"no card is found for gpus=0: the driver of NVIDIA was updated.*; restart the m"
    ):
        Assignment.take(CardWish(("0",)))


# -- local workers ----------------------------------------------------------------------------------------------------


def test_local_workers_are_one_for_each_free_card(cards, monkeypatch):
    assert count_of_workers(NO_WISH, 2) == 2
    assignment = Assignment.take(NO_WISH)
    assert count_of_workers(NO_WISH, 2) == 1
    assert [choice.names for choice in spread(1, NO_WISH)] == [("GPU-10000000-0000",)]
    assignment.release()
    assert count_of_workers(CardWish(("0",)), 2) == 1
    assert count_of_workers(CardWish(("none",)), 2) == 2
    cards.has()
    assert count_of_workers(NO_WISH, 2) == 2
    assert spread(2, NO_WISH) == [NO_WISH, NO_WISH]


def test_local_workers_that_share_a_card_get_equal_parts(cards):
    cards.has(card(0), card(1, memory=8 * GIB))
    wishes = spread(3, NO_WISH)
    assert [choice.names for choice in wishes] == [
        ("GPU-00000000-0000",),
        ("GPU-10000000-0000",),
        ("GPU-00000000-0000",),
    ]
    assert [choice.memory for choice in wishes] == [int(0.45 * 16 * GIB), None, int(0.45 * 16 * GIB)]
    assert [choice.memory for choice in spread(2, CardWish(("1",), GIB))] == [GIB, GIB]


@pytest.mark.parametrize(
    ("workers", "choice", "sentence"),
    [
        (
            1,
            CardWish(("0", "1")),
            "gpus names 2 cards for 1 worker, which compute on one card each; name 1, or start 2",
        ),
        (4, CardWish(("0",), 5 * GIB), "gpu_memory is 5.4 GB for each of 4 workers, but the card 0"),
        (2, CardWish(("none",), GIB), "gpu_memory has no effect with gpus=none"),
    ],
)
def test_spread_that_cannot_work_is_refused(cards, workers, choice, sentence):
    with pytest.raises(ConfigError, match=sentence):
        spread(workers, choice)


def test_choice_of_cards_in_a_program_is_read():
    assert wish([0, 1], "8GiB") == CardWish(("0", "1"), 8 * GIB)
    assert wish() == NO_WISH
    with pytest.raises(ConfigError, match="gpus names the card 0 twice"):
        wish([0, 0])
    with pytest.raises(ConfigError, match="gpu_memory must be a size"):
        wish([0], "much")


def test_command_line_of_a_worker_gives_the_same_choice_of_cards():
    assert CardWish(("0", "1"), GIB).arguments() == ["--gpus", "0,1", "--gpu-memory", "1GiB"]
    assert CardWish(None, 8 * 10**9).arguments() == ["--gpu-memory", "8GB"]
    assert NO_WISH.arguments() == []


@pytest.mark.parametrize(
    ("choice", "described", "differs"),
    [
        (NO_WISH, ["0 (Test Card)"], False),
        (CardWish(("0",)), ["0 (Test Card)"], False),
        (CardWish(("1",)), ["0 (Test Card)"], True),
        (CardWish(("0",)), [], True),
        (CardWish(("none",)), [], False),
        (CardWish(("none",)), ["0 (Test Card)"], True),
        (CardWish(("0",), GIB), ["0 (Test Card), at most 1.1 GB"], False),
        (CardWish(None, GIB), ["0 (Test Card)"], True),
        (CardWish(("GPU-0",)), ["0 (Test Card)"], False),
        (CardWish(("GPU-1",)), ["0 (Test Card)"], True),
        (CardWish(("GPU-0",)), [], True),
        (CardWish(("0", "GPU-1")), ["0 (Test Card)", "1 (Test Card)"], False),
    ],
)
def test_cards_of_a_worker_are_compared_with_the_cluster_file(choice, described, differs):
    assert choice.differs(described, [f"GPU-{description[0]}000" for description in described]) is differs


# -- in the executor ----------------------------------------------------------------------------------------------------


def test_executor_knows_its_cards(monkeypatch):
    assert cards_of_executor() == []
    monkeypatch.setenv("DDLF_CARDS", '["0 (Test Card)"]')
    assert cards_of_executor() == ["0 (Test Card)"]


class Config:
    """``tf.config`` with one card."""

    def __init__(self, used=False):
        self.used = used
        self.limits = None

    def list_physical_devices(self, kind):
        return [kind]

    def get_logical_device_configuration(self, device):
        return self.limits

    def set_logical_device_configuration(self, device, limits):
        if self.used:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        self.limits = limits

    LogicalDeviceConfiguration = SimpleNamespace


def test_limit_reaches_tensorflow_before_its_first_use(monkeypatch):
    config = Config()
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("DDLF_GPU_MEMORY", str(4 * GIB))
    monkeypatch.setenv("DDLF_CARDS", '["0 (Test Card), at most 4.3 GB"]')
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    prepare_framework()
    assert config.limits[0].memory_limit == 4096
    config.used = True
    prepare_framework()  # a second run of the same executor
    config.limits = None
    with pytest.raises(ConfigError, match="gpu_memory cannot limit TensorFlow, because it has used the card already"):
        prepare_framework()


def test_limit_reaches_torch(monkeypatch):
    fractions = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda number: SimpleNamespace(total_memory=16 * GIB),
        set_per_process_memory_fraction=lambda fraction, number: fractions.append((fraction, number)),
    )
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("DDLF_GPU_MEMORY", str(4 * GIB))
    monkeypatch.setenv("DDLF_CARDS", '["0 (Test Card), at most 4.3 GB"]')
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    prepare_framework()
    assert fractions == [(0.25, 0)]


def test_jax_learns_that_it_has_no_card_after_its_import(monkeypatch):
    changed = {}
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("DDLF_CARDS", "[]")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=Recorded(changed)))
    prepare_framework()
    assert changed == {"jax_platforms": "cpu"}


class Recorded:
    """``jax.config``"""

    jax_platforms = None

    def __init__(self, changed):
        self._changed = changed

    def update(self, name, value):
        self._changed[name] = value


def test_executor_without_an_assignment_touches_no_framework(monkeypatch):
    monkeypatch.delenv("DDLF_CARDS", raising=False)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: pytest.fail(name))
    prepare_framework()


def test_each_worker_of_a_machine_gets_one_instance_of_a_divided_card(cards):
    cards.has(card(0, instances=[card(7, uuid="MIG-7"), card(8, uuid="MIG-8")]))
    assert spread(2, CardWish(("0:0", "0:1"))) == [CardWish(("MIG-7",)), CardWish(("MIG-8",))]
    with pytest.raises(ConfigError, match="a process can use only one instance"):
        Assignment.take(CardWish(("0:0", "0:1")))


def test_named_card_that_has_fallen_off_the_bus_is_refused_with_this_reason(cards):
    cards.has(card(0, error=15), card(1))
    for take in (Assignment.take, lambda choice: spread(1, choice)):
        with pytest.raises(ConfigError, match=r"for gpus=0: the card 0 has fallen off the bus; reset it"):
            take(CardWish(("0",)))
    assert numbers(Assignment.take(CardWish(("1",)))) == ["1"]
