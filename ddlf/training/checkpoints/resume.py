"""Finds the state that a run continues from: none, the app's earlier training, or a checkpoint. Runs on the master.

Reading changes nothing: a folder is created, claimed or cleaned only before a write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddlf.algorithms.rule_text import Named
from ddlf.algorithms.weights import Weights
from ddlf.data.app_data import data_set_of
from ddlf.errors import CheckpointCorrupt, CheckpointMismatch, ConfigError
from ddlf.events import CheckpointDamaged, Warned
from ddlf.settings.setting import Use
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.contents import Checkpoint, is_checkpoint
from ddlf.training.checkpoints.keeper import Keeper
from ddlf.training.checkpoints.sliced_resume import Restoring, names_of
from ddlf.training.checkpoints.slices import WEIGHTS
from ddlf.training.context import App
from ddlf.training.progress import Progress, WeightsRef, shapes
from ddlf.training.refusals import check_slots
from ddlf.training.registry import DEFAULTS, EXCHANGE, MODE, SETTINGS, flat
from ddlf.training.samples.files import files_of
from ddlf.training.slot.build import describe, describe_optimizer, describe_weights, without_numbers
from ddlf.training.slot.parts import PARTS
from ddlf.training.slot.variables import is_made, shapes_of
from ddlf.training.spec import RunSpec

SAME_TRAINING = ("samples", "data", "model", "precision", "optimizer")
"""Settings that cannot change when an app is trained again; neither can the settings of the optimizer."""


def check_folders(app: App, fresh: bool) -> None:
    """Check the folders in the settings ``checkpoint`` and ``resume`` before anything starts. Reads only names.

    Raises:
        ConfigError: Two settings contradict each other, or a folder is used for another run.
        CheckpointError: There is no checkpoint to continue from.
    """
    if fresh and app.resume is not None:
        raise ConfigError(
            f"fresh=True starts again, but resume={str(app.resume)!r} continues", hint="leave out one of the two"
        )
    target, source = checkpoint_folders(app)
    for name in ("checkpoint", "resume"):
        where = getattr(app, name)
        if where is not None and str(where) != "auto" and Path(where).is_file():
            raise ConfigError(f"{name} must be a folder, but {str(where)!r} is a file")
    if target is not None and is_checkpoint(target):
        raise ConfigError(
            f"checkpoint={str(target)!r} is itself a checkpoint, not a folder of them", hint=f"name {target.parent}"
        )
    if target is None:
        return
    _check_can_write(target)
    newest = CheckpointFolder(target).newest_round()
    if source is None:
        if newest is not None and str(app.resume) != "auto" and (fresh or _training(app) is None):
            raise _used(target, newest)
    elif is_checkpoint(source):
        number = _number(source)
        if newest is not None and (not _is_same_folder(target, source.absolute().parent) or newest != number):
            raise ConfigError(
                f"{target} has checkpoints already, the newest of round {newest}, but {source} is another checkpoint",
                hint="set checkpoint to another folder to continue from there; the old folder stays unchanged",
            )
    elif CheckpointFolder(source).newest_round() is None:
        CheckpointFolder(source).newest(required=True)  # raises the error
    elif newest is not None and not _is_same_folder(target, source):
        raise _used(target, newest)


def _check_can_write(target: Path) -> None:
    """Raise a ConfigError if the folder for checkpoints cannot be made or written to, as its names and modes tell."""
    existing = next(path for path in (target.absolute(), *target.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ConfigError(
            f"checkpoint={str(target)!r} cannot be made, because {str(existing)!r} is a file",
            hint="choose another folder",
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"checkpoint={str(target)!r} cannot be used, because {str(existing)!r} cannot be written to",
            hint="choose another folder",
        )


def _is_same_folder(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


def checkpoint_folders(app: App) -> tuple[Path | None, Path | None]:
    """Return the folder that the run writes checkpoints to, and the folder or checkpoint that it resumes from.

    The second one is None for ``resume="auto"`` and without ``resume``.
    """
    target = None if app.checkpoint is None else Path(app.checkpoint)
    if app.resume is None:
        return target, None
    if str(app.resume) == "auto":
        if target is None:
            raise ConfigError(
                "resume='auto' needs a folder of checkpoints", hint="set checkpoint, too (--checkpoint DIR)"
            )
        return target, None
    source = Path(app.resume)
    if target is None and is_checkpoint(source):
        if _number(source) is None or not (source.absolute().parent / "owner.json").exists():
            raise ConfigError(
                f"{source} is in no checkpoint folder, so the folder for new checkpoints is unknown",
                hint="set checkpoint, too",
            )
        return source.absolute().parent, source
    return target or source, source


def _number(checkpoint: Path) -> int | None:
    match = re.fullmatch(r"round-(\d{6,})", checkpoint.absolute().name)
    return int(match[1]) if match else None


def _used(folder: Path, newest: int) -> ConfigError:
    return ConfigError(
        f"{folder} has checkpoints already, the newest of round {newest}",
        hint="continue from it with resume='auto' (--resume auto), or choose another folder",
    )


def _training(app: App) -> Progress | None:
    progress: Progress | None = app.run_context.progress
    return progress


@dataclasses.dataclass(slots=True)
class Damage:
    """The damage of checkpoints that the begin of a run has found.

    Args:
        unreadable: Errors of checkpoints whose slices workers could not read, by name.
        reported: The sentences of the events about it.
    """

    unreadable: dict[str, CheckpointCorrupt] = dataclasses.field(default_factory=dict)
    reported: set[str] = dataclasses.field(default_factory=set)


async def begin(
    app: App,
    samples: int,
    spec: RunSpec,
    *,
    fresh: bool,
    restoring: Restoring | None = None,
) -> tuple[Progress, Keeper | None, Path | None]:
    """Find the state that a run continues from, and plan the run.

    Args:
        app: The user's ``IApp``, prepared.
        samples: n, the number of samples.
        spec: All settings of the run.
        fresh: Whether to ignore the app's earlier training, except for the model's weights.
        restoring: Lets workers read slices of a checkpoint, if they hold the weights.

    Returns:
        The progress; the keeper of checkpoints, or None; the folder or checkpoint that the run continues from, or None.

    Raises:
        CheckpointMismatch: The checkpoint or the earlier training has other settings. The message lists the
            differences.
        CheckpointError: There is no complete checkpoint.
        ConfigError: The folder has checkpoints of another training.
        LeaseError: Another master writes into the folder.
    """
    now = settings_of(app, spec)
    epochs, worker_epochs, policy = spec.epochs, spec.local.epochs, app.run_context.data
    length = {
        "portion": (spec.local.steps or 0) * spec.data.batch_size,
        "together": spec.local.round_samples or 0,
    }
    target, source = checkpoint_folders(app)
    checkpoint, data = None, files_of(app)
    damage = Damage()
    if app.resume is not None and target is not None:
        checkpoint = await _checkpoint_to_continue(
            app, source or target, restoring, damage, required=source is not None
        )
    before = None if fresh else _training(app)
    if checkpoint is not None:
        progress = Progress.from_checkpoint(checkpoint) if restoring is None else restoring.begin(checkpoint)
        policy.continue_with(progress.ledger)
        check_same_model(
            dict(zip(names_of(checkpoint), shapes(progress.weights), strict=True)), describe_weights(app.model)
        )
        slots = len(progress.states)
        check_settings(
            {**_upgrade_settings(progress.settings), "slots": slots},
            {**now, "slots": app.slots or slots},
            "in the checkpoint",
            "use the same settings, or start again in another folder",
        )
        if rewritten := _rewritten(progress.settings.get("files", {}), now.get("files", {})):
            sentence = f"{', '.join(rewritten)} may have other values than before the run stopped: the time of writing is another"
            app.run_context.emit(Warned(about="data", why=sentence))
        planned_epochs = progress.planned_epochs
        progress.plan(epochs, worker_epochs, more=False, **length)
        progress.converged = progress.converged and progress.planned_epochs <= planned_epochs
        progress.planned_epochs = max(planned_epochs, progress.planned_epochs)
    elif before is not None:
        progress = _go_on(app, before, now)
        policy.continue_with(progress.ledger)
        progress.plan(epochs, worker_epochs, more=app.resume is None, **length)
    else:
        slots = policy.slots(spec.slots_on(app.cluster.places))
        if slots > samples:  # raise the error before any state is made for each slot
            policy.owners(app, spec, slots)
        progress = Progress(
            weights=_weights_of(app),
            ledger=policy.ledger(data),
            versions_from=[] if data is None else [(0, data.manifest.version)],
            states=[{} for _ in range(slots)],
            speeds=[None] * slots,
        )
        progress.plan(epochs, worker_epochs, more=False, **length)
    if data is not None:
        progress.ledger.sizes, progress.ledger.at = data.manifest.sizes, data.in_version
        progress.ledger.inexact = data.inexact
    fewest = min(map(progress.tasks_in, range(progress.reached, len(progress.epochs))), default=0)
    check_slots(spec, len(progress.states), fewest)
    # Before a folder is opened, since this may raise an error.
    progress.owners = policy.owners(app, spec, len(progress.states))
    progress.settings, progress.compiled = now, describe_optimizer(app.model.optimizer)
    continues_target = target is not None and (
        source is None or _is_same_folder(target, source) or _is_same_folder(target, source.absolute().parent)
    )
    keeper = (
        None if target is None else await _open(app, target, progress, checkpoint if continues_target else None, damage)
    )
    return progress, keeper, None if checkpoint is None else source or target


def _weights_of(app: App) -> Weights | WeightsRef:
    """Return the current weights of the app's model. If it has no memory for them, these are its first weights."""
    model, first = app.model, app.run_context.first
    if all(map(is_made, model.weights)):
        return model.get_weights()  # type: ignore[no-any-return]
    return first or WeightsRef(like=shapes_of(model.weights), group=WEIGHTS, first=model.get_weights)


async def _checkpoint_to_continue(
    app: App,
    folder: Path,
    restoring: Restoring | None,
    damage: Damage,
    *,
    required: bool,
) -> Checkpoint | None:
    """Return the checkpoint that the run continues from, after every byte was checked.

    If workers find damage in its slices, it is added to ``damage``, and another checkpoint is searched.
    """
    while True:
        checkpoint = await _read(app, damage, _find, folder, required=required, skip_slices=restoring is not None)
        if checkpoint is None or checkpoint.slices is None or restoring is None:
            return checkpoint
        try:
            await restoring.check(checkpoint.slices)
            return checkpoint
        except CheckpointCorrupt as error:
            damage.unreadable[checkpoint.slices.final.name] = error


async def _read(
    app: App, damage: Damage, read: Callable[..., Checkpoint | None], *args: Any, **options: Any
) -> Checkpoint | None:
    """Read a checkpoint on a thread, and emit one event for each damaged file that could be replaced."""
    sentences: list[str] = []
    try:
        return await asyncio.to_thread(read, *args, **options, report=sentences.append, known_damage=damage.unreadable)
    finally:
        for sentence in sentences:
            if sentence not in damage.reported:  # checkpoints are read again after damage, and before the first write
                damage.reported.add(sentence)
                app.run_context.emit(CheckpointDamaged(why=sentence))


def _find(
    folder: Path,
    required: bool,
    report: Callable[[str], None],
    skip_slices: bool,
    known_damage: dict[str, CheckpointCorrupt],
) -> Checkpoint | None:
    if not is_checkpoint(folder):
        return CheckpointFolder(folder).newest(
            required=required, report=report, skip_slices=skip_slices, known_damage=known_damage
        )
    if folder.name in known_damage:
        raise known_damage[folder.name]
    return CheckpointFolder(folder.absolute().parent).load(folder.absolute(), report=report, skip_slices=skip_slices)


def _go_on(app: App, before: Progress, now: dict[str, Any]) -> Progress:
    """Return the progress of the app's earlier training in this process, with the model's current weights."""
    slots = len(before.states)
    same_before = {
        name: value for name, value in before.settings.items() if name in SAME_TRAINING or name.startswith("optimizer ")
    }
    check_settings(
        {**same_before, "slots": slots},
        {**now, "slots": app.slots or slots},
        "before",
        "leave it as it was, or start again from the model's weights with fresh=True",
    )
    compiled = describe_optimizer(app.model.optimizer)
    if compiled != before.compiled and compiled != {name: now.get(name) for name in compiled}:
        raise ConfigError(
            "the master's model was compiled with another optimizer since the training before, but workers train with "
            "the one of create_model",
            hint="change it in create_model, and start again from the model's weights with fresh=True",
        )
    rules = ("exchange", "outer", "arrival", "push_rule", "shards", "shard_cut", "softsync")
    same = all(_comparable(rule, before.settings.get(rule)) == _comparable(rule, now.get(rule)) for rule in rules)
    dropped = [part.name for part in PARTS if not part.can_continue(before.settings, now, same)]
    return dataclasses.replace(
        before,
        weights=_weights_of(app),  # the user may have changed them
        converged=False,
        reason="",
        spent=False,
        state=before.local_state() if same else {},
        remote_state={},
        callbacks=None,  # they start fresh, as in a new fit
        begun=0,
        states=[{name: group for name, group in state.items() if name not in dropped} for state in before.states],
    )


async def _open(app: App, path: Path, progress: Progress, resumed: Checkpoint | None, damage: Damage) -> Keeper:
    """Become the only process that writes into a folder, which may only have checkpoints of this training.

    Args:
        app: The user's ``IApp``.
        path: The folder.
        progress: The progress that the run continues from.
        resumed: The checkpoint in this folder that the progress is from, if any.
        damage: The damage of checkpoints in it.
    """
    folder = CheckpointFolder(path, keep=app.checkpoint_keep)
    opening = asyncio.ensure_future(asyncio.to_thread(folder.open, type(app).__name__, takeover=app.takeover))
    try:
        await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread continues, and would leave the folder locked by this process.
        await asyncio.wait([opening])
        if opening.exception() is None:
            await asyncio.to_thread(folder.close)
        raise
    try:
        # Look again, since from now on no other process writes there.
        newest = await _read(app, damage, folder.newest, skip_slices=resumed is not None)
        keeper = Keeper(
            folder, app.checkpoint_every, [row[0] for row in describe_weights(app.model)], app.run_context.emit
        )
        if newest is not None:
            ours = newest.facts.get("training") == progress.training and newest.round <= progress.version
            if not (newest.round == resumed.round if resumed is not None else ours):
                raise _used(path, newest.round)
            await asyncio.to_thread(folder.go_on_from, newest)
            keeper.resumed_at(newest.round, newest.facts.get("converged", False), len(newest.records))
    except BaseException:
        await asyncio.to_thread(folder.close)
        raise
    return keeper


def settings_of(app: App, spec: RunSpec) -> dict[str, Any]:
    """Return all facts that determine the bits of a run's result, as JSON data for a checkpoint."""
    return {
        **app.run_context.data.facts(),
        **(
            {"files": dict(data_set.sources)}
            if (data_set := data_set_of(app, "train")) is not None and data_set.sources
            else {}
        ),
        "model": hashlib.sha256(json.dumps([row[1:] for row in describe_weights(app.model)]).encode()).hexdigest()[:16],
        **({"text": text.digest} if (text := getattr(vars(app).get("model"), "notation", None)) is not None else {}),
        **app.run_context.optimizer,  # the workers' optimizer; the master has an equal one
        **rules_of(spec),
    }


def rules_of(spec: RunSpec) -> dict[str, Any]:
    """Return the settings that determine the bits of a run's result, as JSON data."""
    values = flat(spec)
    kind_settings = {
        setting.name: setting for group in (spec.exchange, spec.train) for setting in group.settings()
    }  # of other packages, too
    return {
        name: _fact(values[name]) for name, setting in {**SETTINGS, **kind_settings}.items() if Use.FACT in setting.use
    }


def _comparable(name: str, value: Any) -> Any:
    """Return a stored setting in a form for comparisons. Exchanges that give the same bits count as equal."""
    if name == "optimizer inner_optimizer" and isinstance(value, str):
        return without_numbers(value)  # older checkpoints have numbers in it
    kind = EXCHANGE.find(value) if name == "exchange" else None
    return value if kind is None else kind.same_bits_as or value


def _fact(value: Any) -> Any:
    """Return the form in which a setting's value is stored: for example, a rule becomes its text."""
    if value is None or isinstance(value, int | float | str):
        return value
    return str(value) if isinstance(value, Named) else describe(value)


def _upgrade_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint in the form that the current release gives them.

    Release 0.1 stored rules as the user gave them, and the outer optimizer in Python syntax. It also accepted settings
    without effect in the mode; these are removed.
    """
    facts = {name: value for name, value in saved.items() if not _is_unused(name, value, saved.get("mode"))}
    facts.setdefault("exchange", DEFAULTS["exchange"])
    if (kind := MODE.find(saved.get("mode"))) is not None:
        facts = kind.compared(facts)
    for name in SETTINGS.keys() & facts.keys():
        text = saved[name]
        if name == "outer":
            text = re.sub(r"^(\w+)\((.*)\)$", lambda call: f"{call[1].lower()}:{call[2]}", text).replace(
                "None", "subtract"
            )
        with contextlib.suppress(ConfigError):  # the user's own outer optimizer
            facts[name] = _fact(SETTINGS[name].check(name, text))
    return facts


def _is_unused(name: str, value: Any, mode: str | None) -> bool:
    if name == "exchange" and (kind := EXCHANGE.find(value)) is not None:
        return bool(kind.strategies) and mode not in kind.strategies
    return name in SETTINGS and not SETTINGS[name].used_by(mode)


def check_settings(saved: dict[str, Any], now: dict[str, Any], when: str, hint: str) -> None:
    """Raise an error if a run would continue a training that has other settings.

    Settings that an older version did not store are not compared.

    Raises:
        CheckpointMismatch: Some settings differ. The message lists the differences.
    """
    rows = [
        f"  {name}: {saved[name]!r} {when}, {now.get(name)!r} now"
        for name in sorted(saved.keys() - {"files"})
        if _comparable(name, saved[name]) != _comparable(name, now.get(name))
    ]
    rows += _changed_files(saved.get("files", {}), now.get("files", {}))
    if rows:
        raise CheckpointMismatch(
            f"the run differs from the run that it would continue ({hint}):\n" + "\n".join(rows[:10])
        )


def _changed_files(saved: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    """Yield a row for the error message for each source file of the training data that differs.

    Partition files have no source files.
    """
    for name in sorted(saved.keys() | now.keys()) if saved and now else ():
        if saved.get(name, "").partition(" ")[0] != now.get(name, "").partition(" ")[0]:
            change = "is missing" if name not in now else "is new" if name not in saved else "was written to since"
            yield f"  data: {name} {change}"


def check_same_model(stored: Mapping[str, Any], described: Sequence[Sequence[Any]]) -> None:
    """Raise an error if a checkpoint has the weights of another model. It names the first weight that differs.

    Args:
        stored: The weights of a checkpoint, by number and path, such as ``"0002 dense/kernel"``.
        described: Path, shape and more of each weight of this model.

    Raises:
        CheckpointMismatch: A weight differs. The message shows both weights.
    """
    stored_weights = [(name.partition(" ")[2], tuple(array.shape)) for name, array in stored.items()]
    model_weights = [(str(row[0]), tuple(row[1])) for row in described]
    for number, (old, new) in enumerate(zip_longest(stored_weights, model_weights), 1):
        if old is None or new is None or old[1] != new[1]:
            was, now = (f"{weight[0]} of shape {weight[1]}" if weight else "not there" for weight in (old, new))
            raise CheckpointMismatch(
                f"the checkpoint is of another model: weight {number} is {was} in it, but {now} here",
                hint="use the model of the checkpoint, or start again in another folder",
            )


def _rewritten(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the data files with the same size and footer as before, but another modification time.

    They were written again or copied, and may have other content.
    """
    both = ((name, saved[name].partition(" ")[2], now[name].partition(" ")[2]) for name in sorted(saved.keys() & now))
    return [name for name, before, after in both if before and after and before != after]
