"""Runs an app in other processes, on the master and on workers, to find mistakes that one process cannot show.

A second process loads the app like a worker, to compare data and model. Five trainings on workers find wrong labels.

The app is sent as a pickle, like to a worker. The second process, ``python -m ddlf.extras.advice.processes``, has
another hash seed, and no earlier imports or settings. It runs on the same machine, so it cannot find an app that
depends on the machine's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.data.app_data import contents
from ddlf.data.trees import tree_map, tuples
from ddlf.errors import DDLFError, NotPicklable
from ddlf.extras.advice.facts import AppFacts, OutputFacts
from ddlf.rpc.code import is_installed, pickle_object, unpickle
from ddlf.training.context import App
from ddlf.training.slot.build import describe_weights

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster

SECOND_PROCESS_S = 300.0
"""Maximum seconds for the second process."""
MOST_FILES = 5
FOLDS = 5
LEAST = 20
"""Minimum mean number of samples of a class."""
SECONDS = 300.0
"""Maximum seconds of training a fold."""
SHOWN = 5


def pickled_app(app: App, observations: dict[str, Any]) -> bytes | None:
    """Return the pickled app without data and model. If pickling fails, return None and add the error to ``observations``."""
    try:
        return pickle_object(app)
    except NotPicklable as error:
        observations["travel"] = (error.message,)
        return None


async def observe_second_process(app: App, pickled: bytes) -> dict[str, Any]:
    """Load and build the app in a second process. Return sentences about the differences by subject.

    Args:
        app: The app with the data and the model of this process.
        pickled: The pickled app, without data and model.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, sys.path[0]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(pickled), SECOND_PROCESS_S)
    except TimeoutError:
        return {
            "failed": (f"load_dataset and create_model took more than {SECOND_PROCESS_S:.0f} s in a second process",)
        }
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return {
            "failed": (f"a second process ended with exit code {process.returncode} in load_dataset or create_model",)
        }
    return differences(_contents(app), json.loads(out.decode().rpartition("\n")[2]))


def differences(contents: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compare the data and the model of an app in two processes. Return sentences about the differences by subject."""
    if error := other.get("error"):
        return {"failed": (f"in a second process {error}",)}
    sentences: dict[str, Any] = {}
    names = [
        name for name in {**contents["data"], **other["data"]} if contents["data"].get(name) != other["data"].get(name)
    ]
    if names:
        sentences["data"] = (f"a second process has other values in {', '.join(names)}",)
    if (a := contents["weights"]) != (b := other["weights"]):
        first = next(
            (weight[0] for weight, other_weight in zip(a, b, strict=False) if weight[1:] != other_weight[1:]), ""
        )
        if len(a) != len(b) or first:
            difference = (
                f"{len(b)} weights instead of {len(a)}" if len(a) != len(b) else f"another shape or type of {first}"
            )
            sentences["model"] = (f"a second process has {difference}",)
    if files := other["files"]:
        sentences["files"] = (f"load_dataset and create_model read {', '.join(files[:MOST_FILES])}",)
    return sentences


def _contents(app: App) -> dict[str, Any]:
    return {"data": contents(app), "weights": describe_weights(app.model), "files": []}


def is_of_this_machine(path: str, script: str) -> bool:
    """Return whether other machines may lack a file that the app reads.

    Args:
        path: The path of the file.
        script: The folder of the script. Workers receive the Python files in it.
    """
    real = os.path.realpath(path)
    system_paths = (
        "/proc/",
        "/sys/",
        "/dev/",
        "/etc/",
        "/usr/",
        "/lib",
        os.path.realpath(sys.prefix),
        os.path.realpath(sys.base_prefix),
    )
    home = os.path.expanduser("~")
    shared = [os.environ.get("DDLF_DATA", ""), f"{home}/.keras", f"{home}/.cache", os.environ.get("XDG_CACHE_HOME", "")]
    usual_paths = [
        *system_paths,
        *(os.path.realpath(folder) for folder in shared if folder),
        str(Path(__file__).parents[2]),
    ]
    is_code = real.endswith((".py", ".pyc", ".so", ".pth"))
    return not (is_code or is_installed(real) or real.startswith(tuple(usual_paths))) and os.path.isfile(real)


async def wrong_labels(cluster: Cluster, pickled: bytes, facts: AppFacts) -> dict[str, Any]:
    """Find labels that are probably wrong (confident learning, Northcutt et al., arXiv:1911.00068).

    The samples are divided into 5 folds, stratified by class. For each fold, a worker trains the app's model on the
    other four for as many epochs as the app sets, and predicts it. cleanlab compares the predictions with the labels.

    Args:
        cluster: A cluster, which need not be connected.
        pickled: The pickled app, without data and model.
        facts: The facts of the app.

    Returns:
        A dict with ``doubted`` or ``skipped``; empty for an app without classes. ``doubted`` has the ``count`` of doubtful
        labels among ``of`` labels, their ``samples``, the most doubtful first, and for some of them the ``pairs`` of
        given and likely label. ``skipped`` is the reason why the labels were not checked.
    """
    head = _classes(facts)
    if head is None:
        return {}
    if importlib.util.find_spec("cleanlab") is None:
        return {"skipped": ("wrong labels are found by cleanlab, which is not installed: pip install 'ddlf[advise]'",)}
    is_new = cluster.loop is None
    try:
        await cluster.connect(modules=("keras",))
        predictions = await cluster.map(partial(held_out, pickled), range(FOLDS))
    except DDLFError as error:
        return {"skipped": (f"wrong labels were not searched: {error.message}",)}
    finally:
        if is_new:
            await cluster.close()
    numbers, labels, values = (np.concatenate([prediction[part] for prediction in predictions]) for part in range(3))
    order = np.argsort(numbers)
    return {"doubted": await asyncio.to_thread(_compared, labels[order], _shares(values[order], head))}


def _classes(facts: AppFacts) -> OutputFacts | None:
    """Return the output that predicts the classes; None if the model has none, or there are too few samples to check
    labels.
    """
    if len(facts.heads) != 1 or facts.heads[0].loss not in ("cce", "sce", "bce") or facts.from_files:
        return None
    head, array = facts.heads[0], facts.array(facts.heads[0].target)
    labels = None if array is None or array.non_finite else array.labels
    if labels is None or labels.kind not in ("numbers", "one_hot") or len(head.shape) != 1:
        return None
    classes = sorted(number for number, count in labels.counts.items() if count)
    units = max(2, head.units)
    fit = len(classes) > 1 and classes[0] >= 0 and classes[-1] < units and facts.samples >= LEAST * len(classes)
    return head if fit else None


async def held_out(pickled: bytes, fold: int) -> tuple[Any, Any, Any]:
    """Train on all folds except one, and predict the remaining fold. Runs on a worker.

    Returns:
        The numbers of the predicted samples, their labels as class numbers, and the model's output of shape (samples,
        units).
    """
    import keras

    from ddlf.data.app_data import batches
    from ddlf.extras.advice.collect import build, load
    from ddlf.rpc.code import unpickle

    app: App = unpickle(pickled)
    await load(app)
    await build(app)
    data = batches(app, "train")
    labels = numbers_of(data[1])
    is_held_out = folds_of(labels) == fold
    end = time.monotonic() + SECONDS

    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        """A Keras callback that ends a training that takes too long."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if time.monotonic() > end:
                self.model.stop_training = True

    def selected(selection: Any) -> tuple[Any, ...]:
        return tuple(tree_map(lambda array: array[selection], tuples(part)) for part in data)

    arguments = dict(zip(("x", "y", "sample_weight"), selected(~is_held_out), strict=False))
    app.model.fit(**arguments, batch_size=app.batch_size, epochs=app.master_epochs, verbose=0, callbacks=[Ends()])
    values = app.model.predict(selected(is_held_out)[0], batch_size=app.batch_size, verbose=0)
    return (
        np.flatnonzero(is_held_out),
        labels[is_held_out],
        np.asarray(values, np.float64).reshape(int(is_held_out.sum()), -1),
    )


def numbers_of(y: Any) -> np.ndarray[Any, Any]:
    """Return class numbers of shape (n,) from numbers or one-hot rows."""
    rows = np.asarray(y).reshape(len(y), -1)
    numbers: np.ndarray[Any, Any] = rows.argmax(axis=1) if rows.shape[1] > 1 else rows[:, 0].astype(np.int64)
    return numbers


def folds_of(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the fold of each sample. Folds are stratified by class, with a fixed seed."""
    folds = np.empty(len(labels), np.int64)
    order = np.random.default_rng(17).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    folds[order] = np.arange(len(labels)) % FOLDS
    return folds


def _shares(values: np.ndarray[Any, Any], head: OutputFacts) -> np.ndarray[Any, Any]:
    """Convert the outputs of a model to probabilities of classes, in rows that sum to 1."""
    if head.loss == "bce" and values.shape[1] == 1:
        probability = 1 / (1 + np.exp(-values)) if head.logits else values
        values = np.concatenate([1 - probability, probability], axis=1)
    elif head.logits:
        values = np.exp(values - values.max(axis=1, keepdims=True))
    values = np.clip(values, 1e-9, None)
    shares: np.ndarray[Any, Any] = values / values.sum(axis=1, keepdims=True)
    return shares


def _compared(labels: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> dict[str, Any]:
    from cleanlab.filter import find_label_issues

    how = "low_self_confidence"  # this method finds most labels if 2 % are flipped, with the fewest false alarms
    doubtful = find_label_issues(labels, shares, filter_by=how, return_indices_ranked_by="self_confidence", n_jobs=1)
    likely = shares.argmax(axis=1)
    return {
        "count": len(doubtful),
        "of": len(labels),
        "samples": tuple(int(number) for number in doubtful),
        "pairs": tuple((int(number), int(labels[number]), int(likely[number])) for number in doubtful[:SHOWN]),
    }


def _main() -> None:
    """Load and build the pickled app from standard input, and print its description as the last line."""
    script, out = sys.argv[1], os.dup(1)
    os.dup2(2, 1)  # keep the app's own output out of the answer
    if script:
        sys.path.insert(0, script)
    opened: dict[str, None] = {}

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and "w" not in str(arguments[1] or "r"):
            opened[os.path.abspath(arguments[0])] = None

    from ddlf.data.app_data import check_data
    from ddlf.extras.advice.collect import build, load

    try:
        app = unpickle(sys.stdin.buffer.read())
        sys.addaudithook(hear)
        asyncio.run(load(app))
        check_data(app)
        asyncio.run(build(app))
        files = [path for path in list(opened) if is_of_this_machine(path, script)]
        answer = _contents(app) | {"files": files}
    except (Exception, DDLFError) as error:
        answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    with contextlib.closing(os.fdopen(out, "w")) as file:
        file.write(f"\n{json.dumps(answer)}")


if __name__ == "__main__":
    _main()
