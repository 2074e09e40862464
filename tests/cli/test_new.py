"""Tests of ``ddlf new`` and ``ddlf demo``: the written files, which run without changes."""

import ast
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest

from ddlf.cli import main, new
from tests.commands import several
from tests.end_to_end.test_training import accuracy, started_with
from tests.patience import PATIENCE_S
from tests.processes import command
from tests.templates import Standing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ddlf(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.main(list(arguments))
        return ended.value.code, *capsys.readouterr()

    return run


def test_new_offers_every_template():
    (option,) = [candidate for candidate in new.NEW.parser("ddlf new").options if candidate.dest == "template"]
    assert set(option.offers()) == set(new.TEMPLATES)


@pytest.mark.parametrize("name", new.TEMPLATES)
def test_new_writes_files_and_prints_requirements(ddlf, tmp_path, name):
    assert ddlf("new", "deep/lab", "--template", name)[:2] == (
        0,
        "made      "
        + ", ".join(
            f"deep/lab/{file}"
            for file in (*new.TEMPLATES[name].files, "README.md", "cluster.example.yaml", ".gitignore")
        )
        + "\nnext      cd deep/lab && ddlf run app.py\n",
    )
    for file in new.TEMPLATES[name].files:
        text = (tmp_path / "deep/lab" / file).read_text()
        assert "apps/" not in text
        module = ast.parse(text)
        assert ast.get_docstring(module)
        block = text.partition("# /// script\n")[2].partition("# ///\n")[0]
        script = tomllib.loads("".join(line.removeprefix("# ") for line in block.splitlines(keepends=True)))
        assert script["requires-python"] == ">=3.11"
        assert script["dependencies"][0].startswith("ddlf>=" if name == "rpc" else "ddlf[tensorflow]>=")
    assert "# lab\n" in (tmp_path / "deep/lab/README.md").read_text()


def test_new_refuses_an_existing_folder(ddlf, tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("lab", "file"):
        code, out, err = ddlf("new", name)
        assert (code, out) == (2, "")
        assert err == f"error  {name} exists already and is not overwritten; choose another name\n"
    assert not list((tmp_path / "lab").iterdir())
    assert (tmp_path / "file").read_text() == "mine"


def test_new_reports_a_folder_that_cannot_be_created(ddlf, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = ddlf("new", "file/lab")
    assert code == 2
    assert err == "error  file/lab cannot be written: Not a directory; choose a folder you own\n"


def test_wheel_has_sources_of_templates():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    sources = {source for template in new.TEMPLATES.values() for source in template.files.values()}
    assert included == {f"apps/{source}": f"ddlf/templates/{source}" for source in sources}


def test_demo_names_missing_packages(ddlf, monkeypatch):
    monkeypatch.setattr(new, "has_module", lambda name: name == "numpy")
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    code, out, err = ddlf("demo")
    assert (code, out) == (2, "")
    assert err == (
        "error  the demo trains a model, and keras and tensorflow are not installed; python -m pip install 'ddlf[tensorflow]'\n"
    )


def test_demo_ignores_files_in_current_folder(ddlf, tmp_path):
    (tmp_path / "cluster.yaml").write_text("workers: [127.0.0.1:1]\n")
    code, out, _ = ddlf("demo", "--dry-run", "--batch-size", "5")
    assert code == 0
    assert "cluster   2 workers on this machine\n" in out
    assert "loads     class DigitsCNN of " in out
    assert ["batch_size", "5", "--batch-size"] in [line.split() for line in out.splitlines()]
    assert os.listdir(tmp_path) == ["cluster.yaml"]


@pytest.fixture(scope="module")
def with_small_data(tmp_path_factory):
    """Return an environment with a small data set in the format of MNIST, and a template process for workers with it."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    splits = {"train": 600, "test": 100}
    images = {f"x_{split}": random.integers(0, 256, (count, 28, 28), np.uint8) for split, count in splits.items()}
    labels = {f"y_{split}": random.integers(0, 10, count, np.uint8) for split, count in splits.items()}
    np.savez(folder / "mnist.npz", **images, **labels)  # training on the downloaded data would take a minute
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDLF_DATA", str(folder))
        template, environment = Standing.of_keras(), dict(os.environ)
    yield environment, template
    template.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in new.TEMPLATES if name != "digits"]
)  # test_docs.py runs this template
def test_new_project_runs_unchanged(tmp_path, with_small_data, name):
    environment, template = with_small_data
    command("ddlf.cli.main", "new", "lab", "--template", name, cwd=tmp_path)
    more = ["--master-epochs", "1"] if name != "rpc" else []
    workers = "2" if name == "rpc" else "1"  # its calls have arguments for two workers
    run = ["ddlf", "run", "app.py", "--local", workers, *more]
    scripts = [[script] for script in set(new.TEMPLATES[name].files) - {"app.py"}]
    trained, *outputs = several([run, *scripts], tmp_path / "lab", template, environment)
    assert ("test  " if name != "rpc" else "hosted, by name:") in trained
    for output in outputs:
        assert "accuracy" in output


@pytest.mark.slow
def test_wheel_alone_trains_demo(tmp_path):
    """A new environment has only the wheel. Its requirements come from the environment of the tests."""
    make = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(make, check=True, timeout=PATIENCE_S)
    (wheel,) = tmp_path.glob("ddlf-*.whl")
    venv.create(tmp_path / "new", with_pip=False)
    (packages,) = (tmp_path / "new" / "lib").glob("python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), str(wheel)],
        check=True,
        timeout=PATIENCE_S,
    )
    # A path in a .pth file is searched after the packages of the environment, and its own .pth files are ignored.
    (packages / "others.pth").write_text(str(Path(sys.modules["numpy"].__file__).parents[1]) + "\n")
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    ended = subprocess.run(
        [tmp_path / "new" / "bin" / "python", "-m", "ddlf.cli.main", "demo", "--save", "model.keras"],
        cwd=tmp_path / "empty",
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert accuracy(ended.stdout) >= 0.95
    assert (tmp_path / "empty" / "model.keras").stat().st_size > 10_000
    assert not started_with(environment)
