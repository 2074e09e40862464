"""Tests of finding, naming and masking cards, and of the build of a framework. A stand-in replaces NVML."""

import importlib
import re

import pytest

from ddlf.errors import ConfigError
from ddlf.worker import cards as module
from ddlf.worker.cards import Build, build_of, facts_of_cards, find_cards, named_cards, read_names, visible_cards
from tests.cards import GIB, card

INSTANCES = [
    {"uuid": f"MIG-{number}", "name": "Test Card MIG 3g.40gb", "memory": 8 * GIB, "free": 7 * GIB} for number in (0, 1)
]


def test_cards_are_found_with_their_driver(cards):
    cards.has(card(0, free=GIB, processes=[7, 8]), card(1), cuda=12040, driver="550.54")
    cards_of_machine = find_cards()
    assert (cards_of_machine.driver, cards_of_machine.cuda, cards_of_machine.problem) == ("550.54", "12.4", "")
    assert [
        (found_card.number, found_card.uuid, found_card.free // GIB, found_card.processes)
        for found_card in cards_of_machine.cards
    ] == [
        ("0", "GPU-00000000-0000", 1, (7, 8)),
        ("1", "GPU-10000000-0000", 16, ()),
    ]
    assert str(cards_of_machine.cards[0]) == "0 (Test Card)"


def test_instances_of_a_divided_card_are_cards(cards):
    cards.has(card(0, instances=INSTANCES), card(1))
    assert [(found_card.number, found_card.memory // GIB) for found_card in find_cards().cards] == [
        ("0:0", 8),
        ("0:1", 8),
        ("1", 16),
    ]


@pytest.mark.parametrize(
    ("error", "on_the_bus", "problem", "do"),
    [
        (12, False, "", ""),
        (12, True, "it has a card of NVIDIA, but no driver that runs", "install the driver"),
        (9, True, "it has a card of NVIDIA, but no driver that runs", "install the driver"),
        (18, True, "the driver of NVIDIA was updated, and the old one still runs", "restart the machine"),
        (15, True, "the driver of NVIDIA does not answer: NVML error 15", "dmesg"),
    ],
)
def test_missing_driver_is_named_with_its_remedy(cards, tmp_path, monkeypatch, error, on_the_bus, problem, do):
    cards.has(error=error)
    device = tmp_path / "pci" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n" if on_the_bus else "0x8086\n")
    (device / "class").write_text("0x030000\n")
    monkeypatch.setattr(module, "PCI", tmp_path / "pci")
    cards_of_machine = find_cards()
    assert (cards_of_machine.cards, cards_of_machine.problem) == ((), problem)
    assert do in cards_of_machine.do


def test_divided_card_without_an_instance_is_a_problem(cards):
    cards.has(card(0, instances=[]), card(1))
    cards_of_machine = find_cards()
    assert [found_card.number for found_card in cards_of_machine.cards] == ["1"]
    assert cards_of_machine.problem == "the card 0 is divided (MIG), but has no instance"
    assert cards_of_machine.do.startswith("make one with nvidia-smi mig -cgi")


def test_missing_package_is_named_if_a_driver_is_installed(tmp_path, monkeypatch):
    usual = importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "pynvml" else usual(name))
    monkeypatch.setattr(module, "DRIVER", tmp_path / "version")
    assert find_cards() == module.CardInventory()
    (tmp_path / "version").write_text("NVRM version")
    assert find_cards().do == "python -m pip install nvidia-ml-py"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,1", ("0", "1")),
        ([0, 1], ("0", "1")),
        (" 0:1 ", ("0:1",)),
        (("GPU-8932f937-d72c",), ("GPU-8932f937-d72c",)),
        ("none", ("none",)),
    ],
)
def test_names_are_read_from_texts_and_lists(value, names):
    assert read_names(value) == names


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("0,0", "names the card 0 twice"),
        ([1, 1], "names the card 1 twice"),
        ("", "must name cards, such as [0] or [0, 1], or be none, got ''"),
        ([], "must name cards"),
        (1, "must name cards"),
        (True, "must name cards"),
        ([True], "must name cards"),
        ("-1", "must name cards"),
        ("all", "must name cards"),
        ("none,0", "is either none or names of cards"),
    ],
)
def test_wrong_names_are_refused(value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_names(value)


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        (None, ["0", "1:0", "1:1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-2", ["2"]),
        ("MIG-1", ["1:1"]),
        ("1", ["1:0"]),
        ("0,0", ["0"]),
        ("0,-1,2", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_mask_is_read_as_cuda_reads_it(cards, mask, numbers):
    cards.has(card(0), card(1, instances=INSTANCES), card(2))
    assert [found_card.number for found_card in visible_cards(find_cards().cards, mask)] == numbers


def test_mask_with_a_card_that_does_not_exist_is_refused(cards):
    with pytest.raises(
        ConfigError, match="CUDA_VISIBLE_DEVICES=0,7 names the card 7, which this machine does not have"
    ):
        visible_cards(find_cards().cards, "0,7")


@pytest.mark.parametrize(
    ("names", "mask", "sentence"),
    [
        (["7"], None, r"this machine has no card 7; it has: 0 \(Test Card\), 1:0 \("),
        (["GPU-9"], None, "this machine has no card GPU-9"),
        (["0"], "2", r"the card 0 \(Test Card\) is hidden by CUDA_VISIBLE_DEVICES=2"),
        (["2", "GPU-2"], None, r"the card 2 \(Test Card\) is named twice"),
        (["1"], None, r"the card 1 is divided \(MIG\); name an instance: 1:0, 1:1"),
        (["1:0", "1:1"], None, r"a process can use only one instance of divided cards \(MIG\)"),
    ],
)
def test_card_that_cannot_be_used_is_refused(cards, names, mask, sentence):
    cards.has(card(0), card(1, instances=INSTANCES), card(2))
    with pytest.raises(ConfigError, match=sentence):
        named_cards(find_cards().cards, names, mask)


def test_build_is_read_without_an_import_of_the_framework(cards, monkeypatch):
    assert build_of("jax").cuda == "12"
    assert build_of("tensorflow").cuda == ""
    assert build_of("tensorflow").package.startswith("tensorflow-cpu 2.")
    assert build_of("no_such_backend") == Build()
    torch = cards.site / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise RuntimeError")
    (torch / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    assert build_of("torch") == Build("torch", "13.0", "torch")
    (torch / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n")
    assert build_of("torch").cuda == ""


def test_build_of_tensorflow_for_cuda_is_recognised(tmp_path, monkeypatch):
    folder = tmp_path / "tensorflow/python/platform"
    folder.mkdir(parents=True)
    (tmp_path / "tensorflow/__init__.py").write_text("")
    (folder / "build_info.py").write_text("build_info = dict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])")
    spec = importlib.util.spec_from_file_location("tensorflow", tmp_path / "tensorflow/__init__.py")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    assert build_of("tensorflow").cuda == "12.5.1"


def test_facts_are_plain_data_and_explain_a_wrong_mask(cards):
    facts = facts_of_cards("jax", "7")
    assert facts["wrong"].startswith(
        "CUDA_VISIBLE_DEVICES=7 names the card 7, which this machine does not have; it has:"
    )
    assert (facts["seen"], facts["build_cuda"], facts["extra"]) == ([], "12", "jax-gpu")
    assert facts_of_cards("jax", "1")["seen"] == ["1"]
    assert facts["cards"][0]["name"] == "Test Card"
