"""Measure one program with Keras in this process: the adviser's findings, the effect of its diff, and the accuracy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.advice.defects import Defect, healthy
from ddlf.extras.advice.advise import advise
from ddlf.extras.advice.changes import changed, diff
from ddlf.extras.advice.report import AdviserReport

SEEDS = (1, 2, 3)
POINT = 0.01
OBVIOUS = 0.2
"""Loss of a score. A program that loses more than this with one seed is not trained with other seeds."""
NOISE = 0.005
"""Change of a score that is noise, not the effect of a defect."""
TWO = ("tumours", "reviews", "twins")
NUMBERS = ("friedman", "tides")


def app_of(path: Path) -> Any:
    """Return a new object of the app in a file. The text of the file decides the name of its module.

    Raises:
        LookupError: The file has no app.
    """
    import ddlf

    name = f"advised_{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(None):
        spec.loader.exec_module(module)
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, ddlf.IApp)]
    own_apps = [value for value in kinds if value.__module__ == name]
    if not own_apps:
        raise LookupError(f"no app in {path}")
    return own_apps[0]()


def written(folder: Path, name: str, text: str) -> Path:
    """Write a program into its own folder, and return its path. In a shared folder, other programs would count as parts of it."""
    (folder / name).mkdir(exist_ok=True)
    path = folder / name / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, and return to the previous one at the end."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def ask_adviser(app: Any, level: Any, labels: bool = False) -> AdviserReport:
    """Return the report of the adviser for two workers.

    Args:
        app: An app.
        level: The level of ``advise``.
        labels: Whether two local workers look for wrong labels.
    """
    from ddlf.cluster.cluster import Cluster

    cluster = Cluster.local(2) if labels else None
    return asyncio.run(advise(app, level, workers=2, cluster=cluster))


def found_in(answer: AdviserReport) -> list[list[str]]:
    """Return findings as lists of rule, severity, level and sentence."""
    return [[entry.rule.id, entry.severity, entry.rule.level, entry.finding.message] for entry in answer.advice] + [
        [entry.rule.id, "failed", entry.rule.level, entry.why] for entry in answer.failed
    ]


def scores(path: Path, base: str, truth: Any, enough: float = 0.0) -> list[float]:
    """Return the score for each seed after training with plain Keras in one process; 0 if training ends in NaN.

    Args:
        path: The file of the program.
        base: The healthy program that it was made from.
        truth: Test labels of the healthy program.
        enough: After a score below this, no other seed is trained.

    Raises:
        Exception: The program cannot run.
    """
    import keras

    from ddlf.data.app_data import batches
    from ddlf.extras.advice.collect import build, load

    results: list[float] = []
    keras.backend.clear_session()
    model = None
    for seed in SEEDS:
        app = app_of(path)
        app.seed = seed
        asyncio.run(load(app))
        asyncio.run(build(app))
        if model is None:
            model = app.model
            model.optimizer.build(model.trainable_variables)
            begin = [np.asarray(array) for array in model.optimizer.variables]
        else:  # another model would have to be traced
            model.set_weights(app.model.get_weights())
            for variable, value in zip(model.optimizer.variables, begin, strict=True):
                variable.assign(value)
        keras.utils.set_random_seed(seed)
        arguments = dict(zip(("x", "y", "sample_weight"), batches(app, "train"), strict=False))
        model.fit(**arguments, batch_size=app.batch_size, epochs=app.master_epochs, verbose=0)
        labels = app.y_test
        same = truth is not None and base not in NUMBERS and len(_main(labels)) == len(_main(truth))
        out = model.predict(app.x_test, batch_size=256, verbose=0)
        results.append(score(base, _main(out), np.asarray(_main(truth if same else labels))))
        if results[0] < enough:
            break
    return results


def _main(tree: Any) -> Any:
    return tree["digit"] if isinstance(tree, dict) else tree


def score(base: str, out: Any, truth: Any) -> float:
    """Return how well outputs fit labels, from 0 to 1: accuracy, overlap of the ones, or share of explained variance."""
    out = np.asarray(out, np.float64)
    if not np.isfinite(out).all():
        return 0.0
    if base in NUMBERS:
        truth, out = truth.reshape(len(truth), -1).astype(np.float64), out.reshape(len(out), -1)
        return float(max(0.0, 1 - ((out - truth) ** 2).mean() / truth.var())) if out.shape == truth.shape else 0.0
    if base in ("outlines", "rare"):
        hit, actual = (out > 0.5).reshape(len(out), -1), (truth > 0.5).reshape(len(truth), -1)
        both, either = (hit & actual).sum(), (hit | actual).sum()
        return float(both / max(1, either) if base == "outlines" else 2 * both / max(1, hit.sum() + actual.sum()))
    if base in TWO or base == "attributes":
        return float(((out > 0.5).reshape(len(out), -1) == (truth > 0.5).reshape(len(truth), -1)).mean())
    truth = truth.argmax(axis=-1) if truth.ndim == 2 and base != "letters" else truth
    return float((out.argmax(axis=-1) == truth).mean())


def of_base(base: str, folder: Path, earlier: dict[str, Any] | None, train: bool = True) -> dict[str, Any]:
    """Return the findings in a healthy program, and its scores after training unless they are known."""
    path = written(folder, "base", healthy(base))
    with inside(path.parent):
        begin = time.monotonic()
        findings = found_in(ask_adviser(app_of(path), "batch"))
        seconds = time.monotonic() - begin
        return {
            "programs": base,
            "found": findings,
            "scores": earlier["scores"] if earlier and earlier["scores"] else scores(path, base, None) if train else [],
            "seconds": seconds,
        }


def quickly(defect: Defect, folder: Path) -> dict[str, Any]:
    """Return the findings of the quick level in a program with a defect. Every defect counts as harmful."""
    path = written(folder, "program", defect.text())
    with inside(path.parent):
        try:
            findings = found_in(ask_adviser(app_of(path), "quick"))
        except Exception as error:
            findings = [["refused", "E", "quick", str(error)]]
    return {"kind": defect.kind, "base": defect.base, "rules": sorted(defect.rules), "hurts": True, "found": findings}


def of_defect(
    defect: Defect, base: dict[str, Any], folder: Path, earlier: dict[str, Any] | None, train: bool = True
) -> dict[str, Any]:
    """Return the findings in a program with a defect, whether the defect hurts, and whether the diff repairs it.

    Args:
        defect: The defect.
        base: The result of ``of_base`` for its healthy program.
        folder: The folder for files.
        earlier: An earlier record of the defect. Results of training are taken from it.
        train: Whether to train the program; without training, the defect counts as harmful.
    """
    whole = written(folder, "whole", healthy(defect.base))
    path = written(folder, "program", defect.text())
    facts: dict[str, Any] = {
        "kind": defect.kind,
        "base": defect.base,
        "rules": sorted(defect.rules),
        "text": defect.mark,
    }
    with inside(path.parent):
        other = app_of(whole)
        other.load_dataset()
        truth = other.y_test
        before = {(rule, severity) for rule, severity, *_ in base["found"]}
        begin = time.monotonic()
        try:
            answer = ask_adviser(app_of(path), defect.level, labels="D18" in defect.rules)
            findings = found_in(answer)
        except Exception as error:  # said in a sentence, before any training
            answer, findings = AdviserReport(), [["refused", "E", "quick", str(error)]]
        facts |= {"seconds": time.monotonic() - begin}
        facts["found"] = [entry for entry in findings if (entry[0], entry[1]) not in before]
        if defect.nature:
            facts |= {"hurts": True, "nature": defect.nature}
        elif earlier is not None and not earlier.get("untrained"):
            facts |= {name: earlier[name] for name in ("scores", "lost", "hurts", "cannot") if name in earlier}
        elif not train:
            facts |= {"hurts": True, "untrained": True}
        else:
            facts |= _trained(path, defect.base, truth, base["scores"])
        if any(entry.edits for entry in answer.advice):
            facts["fix"] = _mended(path, defect, answer, truth, base["scores"], facts, earlier)
    return facts


def _trained(path: Path, base: str, truth: Any, before: list[float]) -> dict[str, Any]:
    try:
        results = scores(path, base, truth, float(np.mean(before)) - OBVIOUS)
    except Exception as error:
        return {"hurts": True, "cannot": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    lost = float(np.mean(before) - np.mean(results))
    return {"scores": results, "lost": lost, "hurts": lost > max(max(before) - min(before), NOISE)}


def _mended(
    path: Path,
    defect: Defect,
    answer: AdviserReport,
    truth: Any,
    before: list[float],
    mutant: dict[str, Any],
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    """Apply all changes of ``--diff``, and measure the resulting program."""
    edits = [edit for advice in answer.advice for edit in advice.edits]
    ids = {advice.rule.id for advice in answer.advice if advice.edits}
    expected = next(iter(changed(edits).values()))
    patched = subprocess.run(["patch", "-p0"], input=diff(edits), text=True, capture_output=True).returncode == 0
    text = path.read_text("utf-8")
    facts: dict[str, Any] = {
        "rules": sorted(ids),
        "applies": patched and text == expected,
        "text": zlib.crc32(text.encode()),
    }
    same = earlier.get("fix", {}) if earlier is not None else {}
    again = written(path.parents[1], "mended", text)
    try:
        left = {entry[0] for entry in found_in(ask_adviser(app_of(again), defect.level))}
        facts["silent"] = not ids & left
        if not defect.nature and not mutant.get("untrained"):
            if text == healthy(defect.base):
                facts["scores"] = before
            elif same.get("text") == facts["text"] and "scores" in same:
                facts["scores"] = same["scores"]
            else:
                facts["scores"] = scores(again, defect.base, truth, float(np.mean(before)) - OBVIOUS)
            facts["runs"] = True
            if mutant["hurts"]:
                facts["back"] = float(np.mean(facts["scores"])) >= float(np.mean(before)) - POINT
    except Exception as error:
        facts |= {"runs": False, "error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return facts
