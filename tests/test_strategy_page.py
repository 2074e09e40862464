"""Tests of ``docs/howto/strategy.md``: its code, installed like a package, trains."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ddlf.cli.completion import print_candidates
from ddlf.cli.main import all_commands, main
from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.testing import FakeCluster, FakeRun, in_process_cluster
from ddlf.training import registry
from tests.training.models import Blobs

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "strategy.md").read_text()
RING, NARROW = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code.startswith('"""'))
ENTRY = re.search(r'^ring = "(.*)"$', PAGE, re.MULTILINE)[1]


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """Install both modules of the page and their entry points into a folder on the path, like ``pip install``."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "ring.py").write_text(RING)
    (folder / "narrow.py").write_text(NARROW)
    about = folder / "ring-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ring\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[ddlf.strategies]\nring = {ENTRY}\n[ddlf.exchanges]\nnarrow = narrow:Narrow\n"
    )
    monkeypatch.syspath_prepend(folder)
    registry.outside.cache_clear()
    yield
    registry.outside.cache_clear()
    for name in ("ring", "narrow"):
        sys.modules.pop(name, None)


async def trained(mode="ring", **settings):
    run = FakeRun(FakeCluster(2), **{"slots": 3, "master_epochs": 3, **settings})
    run.mode = mode
    await run.train_model()
    return run


def state(run):
    return {name: [w.tobytes() for w in group] for name, group in run.run_context.progress.state.items()}


@pytest.fixture
def ddlf_says(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in a folder with an app, and returns its output, errors and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)
    (tmp_path / "app.py").write_text(
        "import ddlf\nclass App(ddlf.IApp):\n    def load_dataset(self): ...\n    def create_model(self): ...\n"
    )

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return (*capsys.readouterr(), ended.value.code)

    return run


def test_help_names_strategies_and_exchanges_of_other_packages_without_importing_them(ddlf_says):
    text = " ".join(ddlf_says("run", "--help")[0].split())
    assert "gradient of all samples (lbfgs); also ring --master-epochs" in text
    assert {*registry.STRATEGIES, *registry.EXCHANGES} <= {*text.rpartition("with one of ")[2].split(", ")}
    assert text.endswith(", ring, narrow")
    assert not {"ring", "narrow"} & {*sys.modules}


def test_help_of_a_strategy_of_another_package_lists_its_settings(ddlf_says):
    text, _, code = ddlf_says("run", "--help", "ring")
    assert code == 0
    assert text.endswith(
        "ring:\n  Each slot mixes its weights with those " + "of its two neighbours after each round.\n"
        "  Choose it with --mode ring:mixing=0.5.\n"
        "  -p mixing=X           part of the weights that comes from the neighbours\n"
        "                        (default: 0.5)\n"
    )
    help_text = ddlf_says("run", "--help-all")[0]
    assert "-p mixing=X" in help_text
    assert "also narrow" in " ".join(help_text.split())


def test_help_of_a_strategy_that_cannot_be_imported_says_why(ddlf_says, monkeypatch):
    monkeypatch.setitem(sys.modules, "ring", None)
    text, _, code = ddlf_says("run", "--help", "ring")
    assert code == 0
    assert "ring:\n  'ring' of the package ring cannot be imported: ModuleNotFoundError" in text


def test_completion_offers_names_and_settings_of_other_packages(ddlf_says, capsys):
    offered = {}
    for words in (("--mode", ""), ("--exchange", ""), ("--help", ""), ("-p", "")):
        print_candidates(["run", *words], all_commands())
        offered[words[0]] = [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert offered["--mode"] == [*registry.STRATEGIES, "ring"]
    assert offered["--exchange"] == [*registry.EXCHANGES, "narrow"]
    assert {"ring", "narrow", "downpour"} <= {*offered["--help"]}
    assert {"mixing=", "checkpoint_keep="} <= {*offered["-p"]}


def test_config_shows_settings_of_another_package_with_their_origins(ddlf_says):
    def mixing(*words):
        text, *_ = ddlf_says("config", "show", "app.py", "--origin", *words)
        return next((line.split(maxsplit=2)[1:] for line in text.splitlines() if line.startswith("mixing")), None)

    assert mixing("--mode", "ring") == ["0.5", "default"]
    assert mixing("--mode", "ring:mixing=0.3") == ["0.3", "--mode"]
    assert mixing("--mode", "ring", "-p", "mixing=0.3") == ["0.3", "-p mixing"]
    assert mixing() is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mode", "ring", "-p", "mixing=2"), "error  -p mixing: mixing must be a number from 0 to 1, got 2.0"),
        (("-p", "mixing=0.3"), "error  -p mixing: App has no attribute 'mixing'"),
        (
            ("--mode", "ring:mixing=0.3", "-p", "mixing=0.4"),
            "error  mixing=0.4, but mode has mixing=0.3 in the options",
        ),
        (
            ("--mode", "ring", "-p", "mixng=0.4"),
            "error  -p mixng: App has no attribute 'mixng', did you mean 'mixing'?",
        ),
        (
            ("--mode", "rng"),
            f"error  --mode: mode must be one of {', '.join(registry.STRATEGIES)}, ring, got 'rng'; did you mean 'ring'?",
        ),
    ],
)
def test_command_line_refuses_wrong_settings_of_another_package(ddlf_says, words, message):
    _, error, code = ddlf_says("config", "show", "app.py", *words)
    assert error.startswith(message)
    assert code == 2


def test_the_strategy_of_the_page_has_at_most_sixty_lines_of_code():
    assert len([line for line in RING.splitlines() if line.strip()]) <= 60


async def test_slots_of_a_ring_keep_separate_weights_and_the_model_is_their_mean():
    run = await trained()
    slots = list(run.run_context.progress.state.values())
    assert len(slots) == 3
    assert not np.array_equal(slots[0][0], slots[1][0])
    np.testing.assert_allclose(run.model.get_weights()[0], np.mean([slot[0] for slot in slots], axis=0), rtol=1e-6)
    assert run.ledger.is_exact(3)


async def test_settings_of_a_ring_can_be_in_the_text_of_the_mode():
    assert state(await trained(mode="ring:mixing=0.3")) == state(await trained(mixing=0.3))
    assert state(await trained()) != state(await trained(mixing=0.3))


async def test_a_resumed_ring_ends_with_the_same_bits_and_refuses_another_mixing(tmp_path):
    uninterrupted = await trained()
    await trained(master_epochs=1, checkpoint=tmp_path)
    resumed = await trained(checkpoint=tmp_path, resume="auto")
    assert state(resumed) == state(uninterrupted)
    with pytest.raises(CheckpointMismatch, match=r"mixing: 0\.5 in the checkpoint, 0\.3 now"):
        await trained(checkpoint=tmp_path, resume="auto", mixing=0.3, master_epochs=4)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"mode": "ring:mixing=2"}, "mixing must be a number from 0 to 1, got 2.0"),
        ({"mode": "ring:mixing=abc"}, "mixing must be a number from 0 to 1, got 'abc'"),
        ({"mixing": [1]}, "mixing must be a number from 0 to 1, got [1]"),
        (
            {"mode": "sync", "exchange": "narrow", "weights_codec": "bfloat16"},
            "weights_codec='bfloat16' has no effect with exchange='narrow': weights always travel as differences of 8 bits",
        ),
        (
            {"mode": "downpour", "exchange": "narrow"},
            "exchange='narrow' has no effect in Downpour training: replicas push to servers and fetch from them",
        ),
        ({"merge": "median"}, "merge='median' is for synchronous training"),
        ({"exchange": "sharded"}, "exchange='sharded' is for synchronous training"),
        ({"weights_codec": "delta:int8"}, "weights_codec='delta:' is not for ring training"),
    ],
)
async def test_ring_refuses_settings_without_effect(settings, refused):
    with pytest.raises(ConfigError, match=re.escape(refused)):
        await trained(**settings)


async def test_the_exchange_of_the_page_sends_differences():
    sent = {}
    for exchange in ("narrow", "star"):
        run = await trained(mode="sync", exchange=exchange)
        sent[exchange] = [
            request[1].weights["delta"] for request in run.cluster.workers[0].asked if request[0] == "train"
        ]
    assert sent["narrow"][-1]
    assert not any(sent["star"])


@pytest.mark.parametrize("mode", ["ring", "async"])
async def test_the_exchange_of_the_page_serves_other_strategies_which_resume_with_the_same_bits(mode, tmp_path):
    settings = {"mode": mode, "exchange": "narrow", "slots": 2 if mode == "ring" else 1}
    uninterrupted = await trained(**settings)
    sent = [
        request[1].weights["delta"]
        for worker in uninterrupted.cluster.workers
        for request in worker.asked
        if request[0] == "train"
    ]
    assert any(sent)
    await trained(**settings, master_epochs=1, checkpoint=tmp_path)
    resumed = await trained(**settings, checkpoint=tmp_path, resume="auto")
    assert [w.tobytes() for w in resumed.model.get_weights()] == [
        w.tobytes() for w in uninterrupted.model.get_weights()
    ]


@pytest.mark.slow
async def test_a_ring_trains_a_keras_model_on_two_workers():
    async with in_process_cluster(2) as workers:
        app = Blobs(workers)
        app.mode = "ring:mixing=0.5"
        records = await app.train_model()
        assert records[-1].loss < records[0].loss
