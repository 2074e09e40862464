"""``ddlf run`` and ``python app.py``: run an app on a cluster, with the options of the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.card_lines import card_lines
from ddlf.cli.dashboard import served
from ddlf.cli.options import (
    check_app_options,
    check_cluster_options,
    named_cluster,
    new_workers,
    reads_cluster_file,
)
from ddlf.cli.output import native_output_to_log, show_error
from ddlf.cli.parsing import check_output
from ddlf.cli.runs import runs_folder
from ddlf.cli.stopping import (
    StopRequest,
    interruptible,
    is_interrupt,
    leave_an_import,
    run_until_signal,
    swallowed_quietly,
)
from ddlf.cli.target import (
    check_file,
    check_needs,
    find_target,
    function_arguments,
    overrides,
    prepare_app,
    takes_a_cluster,
)
from ddlf.errors import ConfigError, DDLFError, LeaseError
from ddlf.events import Evaluated
from ddlf.events.sinks import Sink
from ddlf.extras import suffixes
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.background import reason
from ddlf.monitor.runs.folder import MODEL, STATE
from ddlf.monitor.runs.recording import recorded
from ddlf.monitor.terminal.display import Display
from ddlf.monitor.terminal.lines import line
from ddlf.monitor.ui import LongMaps, attached, choice, chosen, heard, opened
from ddlf.rpc.tokens import find_tokens
from ddlf.training.registry import spec_of
from ddlf.training.roles import PRELOADED, begin_import

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.launch.launcher import Requeue
    from ddlf.training.spec import RunSpec

Then = Callable[[Any, argparse.Namespace, StopRequest], Coroutine[Any, Any, int]]
TASK_VARIABLES = ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
"""One of them is set in a task of Slurm or MPI, or in a pod of a Job."""
NOT_SAVED = 7
"""The exit code of a complete training whose model could not be saved at its path."""
ASK_AGAIN_S = 1.0
"""Between two tries to get workers that another run uses, on average."""


def run_file(options: argparse.Namespace) -> int:
    """Run ``ddlf run``: run the app or function in a file, and return the exit code."""
    path: Path = options.app

    def find() -> Any:
        check_before_import(options)
        if _will_train_here(path, options):
            from ddlf.cluster.launch.local import start_template_early

            start_template_early(PRELOADED)
        return find_target(path, options.target, options)

    try:
        return execute(find, options)
    finally:
        if local := sys.modules.get("ddlf.cluster.launch.local"):
            local.end_early_template()


def check_before_import(options: argparse.Namespace) -> None:
    """Check the file and the options of a run that need no app, because the app may import for a minute.

    If the file's text names no app, only check the file: the target may be a function that needs no cluster.

    Raises:
        DDLFError: There is no such file, or a value, the cluster file, the token file or the checkpoint is wrong.
    """
    path: Path = options.app
    check_file(path)
    if not _has_app(path):
        return
    check_cluster_options(options)
    from ddlf.cli.config import check_given_values

    check_given_values(options)
    if options.token_file is not None:
        find_tokens(options.token_file)
    source = resumed_from(options)
    if source not in (None, "auto") and not Path(source).exists():
        from ddlf.training.checkpoints.checkpoint import CheckpointFolder

        CheckpointFolder(source).newest(required=True)  # raises the error


def _has_app(path: Path) -> bool:
    """Return whether the text of a file has an app, as far as it tells."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.suffix in suffixes("file_types") or "IApp" in path.read_text(encoding="utf-8")
    return False


def _will_train_here(path: Path, options: argparse.Namespace) -> bool:
    """Return whether running a file probably needs local workers. They are then started early, to import Keras while
    this process imports the file.

    A wrong answer only costs time.
    """
    with contextlib.suppress(DDLFError):
        return not options.dry_run and _has_app(path) and new_workers(options)
    return False


def execute(find: Callable[[], Any], options: argparse.Namespace, then: Then | None = None) -> int:
    """Find and run a target, which is an app class or a function; return the exit code. Every error is printed as one
    sentence.

    Args:
        find: Returns the ``IApp`` subclass or the async function that takes a cluster.
        options: The parsed options.
        then: A function that uses the target; by default it runs the target on the cluster that the options name.
    """
    then = then or run_target
    with native_output_to_log(), swallowed_quietly():
        try:
            if then is run_target and (follow := follower(options)) is not None:
                return follow()
            importing = f"importing {getattr(options, 'app', 'the app')}"
            with opened(asked_ui(options)) as display, display.busy(importing):
                target = interruptible(find)
            code = run_until_signal(lambda stop: then(target, options, stop))
            if code == 143:
                leave_an_import(code)
            return code
        except BrokenPipeError:
            raise  # nobody reads the output any more
        except (Exception, KeyboardInterrupt) as error:
            if is_interrupt(error):
                print("\nstopped", file=sys.stderr)
                leave_an_import(130)
                return 130
            check_output(error)
            # Other errors come from the user's own code on the master, so their traceback helps.
            show_error(error, whole=options.debug)
            code = error.exit_code if isinstance(error, DDLFError) else 1
            leave_an_import(code)
            return code


def asked_ui(options: argparse.Namespace) -> str:
    """Return the name of the display that the options choose for a run, as far as it is known without the app.

    Raises:
        ConfigError: This display cannot be used.
    """
    if options.quiet and options.ui not in (None, "none"):
        raise ConfigError(f"--ui {options.ui} has no effect with --quiet", hint="leave one of them out")
    if options.quiet:
        return "none"
    if options.ui is not None:
        return chosen(options.ui, "--ui")
    return chosen(os.environ.get("DDLF_UI") or "auto", "DDLF_UI")


def follower(options: argparse.Namespace) -> Callable[[], int] | None:
    """Return the work of this process if an engine has started it for a worker, and None if it is the master.

    Raises:
        ConfigError: This is one of several tasks of an engine, and no launcher is named.
    """
    from ddlf.cluster.config.addresses import find_config

    launcher = None
    is_task = any(name in os.environ for name in TASK_VARIABLES)
    if options.launcher is not None:
        from ddlf.cluster.launch.launcher import installed

        launcher = installed(options.launcher, options.workers)
    elif is_task and reads_cluster_file(options) and find_config(options.config):
        from ddlf.cluster.config.cluster_file import load_config

        config = load_config(options.config)
        launcher = None if config.launcher is None else config.new_launcher()
    if is_task and not (launcher is not None and launcher.uses_tasks):
        from ddlf.cluster.launch.ranks import check_one_task

        check_one_task()
    if launcher is not None:
        follow = launcher.follower()
        return (lambda: 0) if follow is not None and options.dry_run else follow
    return None


async def run_target(target: Any, options: argparse.Namespace, stop: StopRequest) -> int:
    """Run an app or a function on the cluster that the options name; return the exit code."""
    is_app = inspect.isclass(target)
    if not is_app:
        arguments = function_arguments(target, options)
        if not takes_a_cluster(target):
            await target(**arguments)
            return 0
    check_cluster_options(options)
    cluster, described = resolve_cluster(options)
    if is_app:
        return await _run_app(target, cluster, described, options, stop)
    if options.requeue:
        raise ConfigError(f"--requeue has no effect: {target.__name__} is a function, which has no checkpoints")
    if options.dry_run:
        from ddlf.cli.dry_run import plan

        return await plan(target, cluster, described, options)
    with opened(asked_ui(options)) as display:
        display.say(f"cluster   {described}")
        async with served(cluster, None, options, display, stop, described):
            await _connect(cluster, options.wait, display, display.tell, ())
            try:
                await check_needs(cluster, target, display.say, local=new_workers(options))
                if display.prints:  # from here on, show only its output and its long maps
                    display.close()
                show = LongMaps(cluster, display) if display.prints else heard(cluster, display.tell)
                with show:
                    await target(cluster, **arguments)
                return 0
            finally:
                await cluster.close()


async def _run_app(
    target: type[IApp], cluster: Cluster, described: str, options: argparse.Namespace, stop: StopRequest
) -> int:
    """Train an app, and record the run in a new folder, unless the user wants none. Return the exit code."""
    from ddlf.cli.config import check_values
    from ddlf.training.start import choose_settings

    options.resume = resumed_from(options)
    app = prepare_app(target, cluster, options)
    check_values(app, options)
    check_app_options(options, app)
    if app.checkpoint is not None and (Path(app.checkpoint) / folder.PEERS).exists():
        raise ConfigError(
            f"{app.checkpoint} is the folder of a training by peers, and has no checkpoints",
            hint=f"name another folder for checkpoints; this training continues with: ddlf peers serve --resume {app.checkpoint}",
        )
    if options.save:
        from ddlf.training.evaluation.master import check_path

        check_path(options.save)
    requeue = requeue_of(app, cluster) if options.requeue else None
    await app.run_context.check()
    if options.dry_run:
        from ddlf.cli.dry_run import plan

        return await plan(app, cluster, described, options)
    job = requeue.job if requeue is not None else ""
    with opened(choice(app)) as display, attached(app, display), in_folder(app, options, display.say, job) as path:
        stop.say = display.note
        stop.requeue = requeue.ask if requeue is not None else stop.requeue
        display.say(f"cluster   {described}")
        if new_workers(options):  # the workers' template imports it now, too
            begin_import()
        async with served(cluster, app, options, display, stop, described):
            await _connect(cluster, options.wait, display, app.run_context.emit, PRELOADED)
            try:
                await check_needs(cluster, target, display.say, local=new_workers(options))
                gpus = (", ".join(worker.executor.gpus) for worker in cluster.workers)
                for text in card_lines(gpus, app.deterministic):
                    display.say(f"cards     {text}")
                await choose_settings(app)
                display.say(f"training  {_described_training(app, cluster)}")
                return await _train_and_save(app, options.save, path, stop)
            finally:
                await cluster.close()


def _described_training(app: IApp, cluster: Cluster) -> str:
    """Return what a run will do, for people: mode, epochs, rounds, slots and seed."""
    spec = spec_of(app)
    epochs = f"{app.master_epochs} epoch{'s' * (app.master_epochs != 1)}"
    steps = spec.local.steps
    length = f"{steps} batch{'es' * (steps != 1)}" if steps else spec.local.epochs
    length = f"{app.round_samples} samples" if app.round_samples else length
    slots = app.slots or (cluster.places if cluster.places > cluster.N else None)
    if spec.exchange.spans_workers:
        per = _group(cluster.N // (slots or 1))
    elif app.slots is None and _resumes(app):
        per = f"slot, slots of the checkpoint on {_workers(cluster.N)}"
    else:
        per = _slots(slots, cluster.N, spec.train.extra_workers)
    batches = _batches(spec, slots, cluster.N, per)
    return f"{type(app).__name__}: {app.mode}, {epochs} in rounds of {length}, {batches}, seed {app.seed}"


def _resumes(app: IApp) -> bool:
    """Return whether a run continues from a checkpoint, which has the number of its slots."""
    if str(app.resume) != "auto" or app.checkpoint is None:
        return app.resume is not None
    from ddlf.training.checkpoints.checkpoint import CheckpointFolder

    return CheckpointFolder(app.checkpoint).newest_round() is not None


def requeue_of(app: IApp, cluster: Cluster) -> Requeue:
    """Return how an engine runs the command again, and let the app continue from its checkpoints then.

    Raises:
        ConfigError: No engine does, or the app has no folder of checkpoints that is the same each time.
    """
    if app.checkpoint is None:
        raise ConfigError(
            "--requeue needs a folder of checkpoints, because the next start continues from them",
            hint="add --checkpoint DIR",
        )
    if app.resume not in (None, "auto"):
        raise ConfigError(
            f"--requeue continues from the run's own checkpoints, but resume={str(app.resume)!r} names others",
            hint="leave --resume out",
        )
    requeue = cluster.requeue()
    app.resume = "auto"
    return requeue


async def _train_and_save(app: IApp, save_path: Path | None, run: Path | None, stop: StopRequest) -> int:
    """Train the app, save the model and evaluate it. The result of all complete rounds is saved, however training ends.

    Args:
        app: The app, connected to its workers.
        save_path: Path for saving the model; None for the run's folder.
        run: Folder of the run; None if it has none.
        stop: Asks the run to end.
    """
    from ddlf.data.app_data import has_data

    path = save_path if save_path is not None or run is None else run / MODEL
    stop.gently = app.stop_training
    stop.words = _effect_of_interrupt(app, path)
    try:
        await app.train_model()
    except BaseException as error:
        stop.gently = lambda: False
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise
        await _save_after_error(app, path)
        raise
    stop.gently = lambda: False
    wanted_path = path
    if path is not None:
        path = await _save(app, path)
    if has_data(app, "test") and stop.terminated:  # SIGKILL follows soon
        print("the test data is not evaluated, because SIGTERM asks for a quick end", file=sys.stderr)
    elif has_data(app, "test"):
        try:
            metrics = await app.evaluate_model()
        except Exception:
            if path is not None:
                print(
                    f"the training is complete and its model is in {path}; only the evaluation failed:", file=sys.stderr
                )
            raise
        if choice(app) == "none":  # report the result anyway
            print(line(Evaluated(metrics=metrics)))
    progress = app.run_context.progress
    stop.is_complete = progress is not None and (progress.is_complete or progress.converged)
    if stop.is_requested:
        print(f"stopped   after {_rounds(app)}{_resume_hint(app)}", file=sys.stderr)
        return 130
    return 0 if path == wanted_path else NOT_SAVED


async def _save(app: IApp, path: Path) -> Path | None:
    """Save the model. If that fails, as on a full disk, save it in a folder for temporary files, because it may be the
    result of hours. Print each failure.

    Returns:
        The file of the model; None if there is none.
    """
    from ddlf.training.evaluation.master import to_its_end

    try:
        await to_its_end(app.save_model(path))
        return path
    except Exception as error:
        sentence = f"the model could not be saved in {path}: {reason(error)}"
    other_folder = None
    try:
        other_folder = Path(tempfile.mkdtemp(prefix="ddlf-model-"))
        other_path = other_folder / path.name
        await to_its_end(app.save_model(other_path))
    except Exception:
        if other_folder is not None:
            with contextlib.suppress(OSError):
                other_folder.rmdir()
        print(f"{sentence}{_resume_hint(app)}", file=sys.stderr)
        return None
    print(f"{sentence}; it is in {other_path} instead: move it, because that folder is temporary", file=sys.stderr)
    return other_path


async def _save_after_error(app: IApp, path: Path | None) -> None:
    """Save the model of the last complete round after training has failed, and print where it is."""
    if not app.history:
        return
    if path is not None and (path := await _save(app, path)) is None:
        return
    if path is not None or app.checkpoint is not None:
        location = f"the model is in {path}" if path is not None else f"everything is in {app.checkpoint}"
        print(f"kept      {_rounds(app)}: {location}{_resume_hint(app)}", file=sys.stderr)


def _rounds(app: IApp) -> str:
    last = app.history[-1]
    return f"round {last.round} of {last.rounds}" if last.slot is None else f"update {last.version}"


def _resume_hint(app: IApp) -> str:
    if app.checkpoint is None:
        return ""
    run = Path(app.checkpoint).parent
    # Checkpoints in a run's folder are found by the run's name.
    run_name = run.name if (run / STATE).exists() else "auto"
    return f"; to continue, run the same command with --resume {run_name}"


def _effect_of_interrupt(app: IApp, path: Path | None) -> str:
    unit = "round" if spec_of(app).train.in_rounds else "update"
    saved = f"; then the model is saved in {path}" if path is not None else ""
    locations = " and ".join(str(location) for location in (path, app.checkpoint) if location is not None)
    at_once = (
        f"at once; {locations} then has the previous {unit}"
        if locations
        else "at once; the run then keeps nothing, since there is no --save"
    )
    return f"after this {unit}{saved}. Press Ctrl-C again to stop {at_once}"


async def _connect(
    cluster: Cluster, wait_s: float | None, display: Display, tell: Sink, modules: Sequence[str]
) -> None:
    """Connect to a cluster. With ``wait_s``, try again while other masters use all missing workers.

    Args:
        cluster: The cluster.
        wait_s: Maximum number of seconds to try again.
        display: The display that shows the wait.
        tell: Receives the events meanwhile.
        modules: Argument of ``Cluster.connect``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (wait_s or 0.0)
    last_error = ""
    while True:
        try:
            with heard(cluster, tell):
                await cluster.connect(modules=modules)
            return
        except LeaseError as error:
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                if wait_s:
                    error.hint = "wait longer: --wait alone waits indefinitely; or take them with --takeover"
                raise
            if str(error) != last_error:
                until = "" if math.isinf(remaining_s) else f" for {remaining_s:.0f} s"
                display.say(f"waiting   {error.message}\n          retrying{until}; press Ctrl-C to stop")
                last_error = str(error)
        # The pause is random. Otherwise two waiting runs could take half of the workers each, again and again.
        await asyncio.sleep(min(remaining_s, random.uniform(0.5, 1.5) * ASK_AGAIN_S))


def resolve_cluster(options: argparse.Namespace) -> tuple[Cluster, str]:
    """Return the cluster that the options name, and its description for people."""
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.config.addresses import find_config

    arguments = {"takeover": options.takeover, "pickle_results": options.pickle_results, "guest": options.dry_run}
    if options.hosts:
        cluster = named_cluster(options, **arguments)
        return cluster, f"--hosts ({_workers(cluster.N)})"
    if options.launcher:
        from ddlf.cluster.launch.launcher import installed

        cluster = Cluster(installed(options.launcher, options.workers), token_file=options.token_file, **arguments)
        return cluster, f"--launcher {options.launcher} ({_workers(cluster.N)})"
    if options.listen:
        from ddlf.cluster.launch.gate import START_TIMEOUT_S, Joined

        joined = Joined(
            options.workers.most,
            *options.listen,
            least=options.workers.least,
            token_file=options.token_file,
            start_timeout_s=options.wait or START_TIMEOUT_S,
        )
        cluster = Cluster(joined, insecure_plaintext=options.insecure_plaintext, **arguments)
        return cluster, f"--listen {joined.host}:{joined.port} ({_workers(cluster.N)})"
    if not options.local and (path := find_config(options.config)):
        from ddlf.cluster.config.cluster_file import load_config

        cluster = Cluster.from_config(options.config, token_file=options.token_file, **arguments)
        name = load_config(options.config).name
        return cluster, f"{f'{name}, ' if name else ''}{path} ({_workers(cluster.N)})"
    reason = "" if options.local else "no cluster file: "
    from ddlf.worker.machine import cores

    core_count = cores()
    cluster = Cluster.local(
        options.local, gpus=options.gpus, gpu_memory=options.gpu_memory, pickle_results=options.pickle_results
    )
    count = cluster.N
    most = "more than one worker is" if core_count == 1 else f"more than {core_count} workers are"
    slow = (
        f", which has only {core_count} core{'s' * (core_count != 1)}: {most} not faster" if count > core_count else ""
    )
    return cluster, f"{reason}{_workers(count)} on this machine{slow}"


def _batches(spec: RunSpec, slots: int | None, workers: int, per: str) -> str:
    """Return the size of a batch and the number of slots or workers, for people; only the slots if there are no batches."""
    if "batch_size" in spec.train.unused:
        count = slots or workers
        return f"{count} slot{'s' * (count != 1)} on {_workers(workers)}"
    return f"batch {spec.data.batch_size} per {per}"


def _group(workers: int) -> str:
    """Return the workers that together train one copy of the model, for people."""
    return f"group of {_workers(workers)}"


def _slots(slots: int | None, workers: int, extra_workers: int = 0) -> str:
    if extra_workers:
        return f"{_slots(slots, workers - extra_workers)}, {extra_workers} more {'holds' if extra_workers == 1 else 'hold'} the weights"
    if slots in (None, workers):
        return f"worker x {_workers(workers)}"
    idle = workers - (slots or 0)
    reserve = f", {idle} spare" if idle > 0 else ""
    return f"slot, {slots} slot{'s' * (slots != 1)} on {_workers(workers)}{reserve}"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


@contextlib.contextmanager
def in_folder(
    app: IApp, options: argparse.Namespace, say: Callable[[str], None], job: str = ""
) -> Iterator[Path | None]:
    """Create the folder of a run, or continue in it, and print its path and the path of its report.

    Args:
        app: The app.
        options: The parsed options.
        say: Prints a line.
        job: The argument of ``recorded``.
    """
    origins = {name: where for name, _, where in overrides(type(app), options)}
    path = None
    try:
        with recorded(app, origins, job) as path:
            if path is not None:
                restarts = folder.read_state(path).restarts
                say(f"folder    {path}" + (f", start {restarts + 1} of this run" if restarts else ""))
            yield path
    finally:
        if path is not None and (path / folder.REPORT).exists():
            say(f"report    {path / folder.REPORT}" + ("" if app.history else " (no round was completed)"))
        elif path is not None and not path.exists():
            say("folder    removed, because the run ended before training began")


def resumed_from(options: argparse.Namespace) -> str | None:
    """Return the folder with the checkpoints that ``--resume`` names, by the name or the folder of their run.

    ``last`` is the newest run with checkpoints.

    Raises:
        ConfigError: The run has no checkpoints.
    """
    name: str | None = options.resume
    if not name or name == "auto" or (Path(name).exists() and not (Path(name) / folder.STATE).exists()):
        return name
    runs = runs_folder(options)
    hint = "--checkpoint-every N writes them into the run's folder"
    if name == "last":
        newest = next(
            (checkpoints for run in folder.runs_in(runs) if (checkpoints := _checkpoints(run)) is not None), None
        )
        if newest is None:
            raise ConfigError(f"no run in {str(runs)!r} has checkpoints", hint=hint)
        return str(newest)
    try:
        run = Path(name) if Path(name).exists() else folder.find(runs, name)
    except ConfigError:
        return name  # not a run: a missing folder is refused later
    if (run / folder.PEERS).exists():
        raise ConfigError(
            f"the run {run.name} is a training by peers", hint=f"continue it with: ddlf peers serve --resume {name}"
        )
    if (newest := _checkpoints(run)) is None:
        raise ConfigError(f"the run {run.name} has no checkpoints", hint=hint)
    return str(newest)


def _checkpoints(run: Path) -> Path | None:
    """Return the existing folder with a run's checkpoints: in the run's folder, or where its summary says."""
    folders = (run / folder.CHECKPOINTS, *folder.checkpoints_of(run))
    return next((candidate for candidate in folders if candidate.is_dir()), None)
