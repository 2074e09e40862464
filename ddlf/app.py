"""``IApp``: what a user subclasses to train a Keras model on a cluster.

The same object lives on both sides. On the master it leads: it holds the cluster and starts training. A copy of it, without
data and model, goes to every worker, where ``load_dataset``, ``create_model`` and ``train`` run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddlf.errors import AppError, ConfigError, DatasetMismatch
from ddlf.training.record import RoundRecord, TrainingEvent

if TYPE_CHECKING:
    import numpy as np

    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.proxy import ProxyWorker
    from ddlf.training.crew import Crew
    from ddlf.training.ledger import Ledger
    from ddlf.training.progress import Keeper, Progress
    from ddlf.training.replica import Replica
    from ddlf.training.slots import Job
    from ddlf.worker.worker import Worker

EVALUATION_BATCH = 512
MASTER_ONLY = frozenset(
    {
        "cluster",
        "model",
        "worker",
        "replica",
        "indices",
        "x_train",
        "y_train",
        "x_test",
        "y_test",
        "history",
        "optimizers",
        "ledger",
    }
    | {"on_round", "on_event", "is_convergent"}
)
"""Attributes that do not travel from the master to the workers; nor do those that begin with an underscore."""


class IApp:
    """Subclass it, write ``load_dataset`` and ``create_model``, and train.

    Class attributes are the defaults of a run; attributes of the object win over them, arguments and command-line flags over both.

    Args:
        cluster: The workers. By default those of ``$DDLF_CONFIG`` or ``./cluster.yaml``, and without such a file two new ones on this machine.

    Attributes:
        mode: ``"sync"`` or ``"async"``: what ``train_model`` does.
        master_epochs: Local epochs of the whole run.
        worker_epochs: Local epochs in a round, between two exchanges of weights.
        batch_size: Of each worker, as in the papers: two workers with 64 each step on 128 samples.
        seed: Of the partitions and of everything random on the workers. Equal seeds give equal bits in synchronous training.
        evaluate_every: Evaluate the test data after every so many rounds while the workers compute the next; 0 for never.
        callbacks: Keras callbacks for ``fit`` on the workers; make them in ``create_model``.
        precision: ``"float32"``, ``"mixed_bfloat16"`` or ``"mixed_float16"`` on the workers; ``"auto"`` is float32 and says what
            bfloat16 would gain.
        slots: K, the logical replicas that the workers carry; None for as many as workers at the beginning. Workers may come and go
            meanwhile: the result depends on K alone.
        optimizer_state: ``"kept"``: each slot's optimizer goes on from round to round, its state comes back with each update (nothing for SGD,
            as much as the weights with momentum, twice that with Adam) and goes to another worker when the slot does; ``"fresh"``: each round
            begins with a new optimizer, and nothing of it travels.
        checkpoint: Folder to write checkpoints to; None for none. One is written after every ``checkpoint_every`` rounds (updates, in
            asynchronous training), and at the end; the last ``checkpoint_keep`` are kept.
        resume: ``"auto"``: go on from the newest checkpoint if there is one; or the folder to go on from. Synchronous training ends with
            the same bits as if it had never been interrupted, unless parts follow the measured speed.
        takeover: Whether to take the folder of checkpoints from another master that writes there; ``Cluster`` has the same for workers.
        wait_for_workers_s: How long to wait when all workers are lost.
        balance: ``"equal"`` parts of the data, or ``"speed"``: parts that follow each worker's measured speed, so that all end together.
        codec: How updates travel back: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"``, ``"int8-block:4096"``, ``"topk:0.01"``.
        weights_codec: How weights travel out: ``"float32"``, ``"float16"``, ``"bfloat16"``, or any codec after ``"delta:"``, which sends
            the difference to what the worker holds.
        merge: How the updates of a round become one: ``"mean"``, weighted by samples; ``"median"`` or ``"trimmed:0.2"``, which few bad
            updates cannot move far. Synchronous training only.
        update_policy: What an update that looks wrong leads to: ``"stop"`` ends training on NaN, infinity or a wrong shape, and names
            worker, tensor and count; ``"reject"`` also compares lengths and directions with the others, has a bad one computed again on
            another worker, and leaves it out if that does not help; ``"clip"`` scales what is only too long.
        outer: How a merged update changes the weights; by default it is subtracted.
        verbose: Whether to print a line for each step.
        history: The records of the last training.
        optimizers: The state of each slot's optimizer after it, as lists of arrays in Keras's order; None for a slot that never trained.
        ledger: How often each sample was trained on in it.

    Example::

        class App(IApp):
            async def load_dataset(self):
                (self.x_train, self.y_train), (self.x_test, self.y_test) = load_mnist()

            async def create_model(self):
                self.model = keras.Sequential([...])
                self.model.compile(...)

        app = App(Cluster.local(2))
        await app.train_sync(master_epochs=10)
        await app.evaluate_model()
    """

    mode: Literal["sync", "async"] = "sync"
    master_epochs: int = 10
    worker_epochs: int = 1
    batch_size: int = 32
    seed: int = 0
    evaluate_every: int = 0
    precision: str = "auto"
    slots: int | None = None
    optimizer_state: Literal["kept", "fresh"] = "kept"
    checkpoint: str | Path | None = None
    checkpoint_every: int = 1
    checkpoint_keep: int = 3
    resume: str | Path | None = None
    takeover: bool = False
    wait_for_workers_s: float = 60.0
    balance: str = "equal"
    codec: str = "float32"
    weights_codec: str = "float32"
    verbose: bool = True
    merge: str = "mean"
    update_policy: str = "stop"
    outer: OuterOptimizer | None = None
    callbacks: tuple[Any, ...] | list[Any] = ()

    _run = ""
    _content = ""

    model: Any
    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    indices: np.ndarray[Any, Any]
    worker: Worker
    replica: Replica
    ledger: Ledger

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        self.history: list[RoundRecord] = []
        self.optimizers: list[Any] = []

    # -- what a user writes -----------------------------------------------------------------------------------------

    async def load_dataset(self) -> None:
        """Set ``x_train``, ``y_train`` and, for the test, ``x_test``, ``y_test``. Runs on the master and on every worker; must be written.

        Arrays, or lists or dicts of arrays for a model of several inputs. All nodes must get equal training data.
        """
        raise AppError(
            f"{type(self).__name__} has no load_dataset", hint="write one that sets self.x_train and self.y_train"
        )

    async def create_model(self) -> None:
        """Set ``model`` to a compiled Keras model. Runs on the master and on every worker; must be written."""
        raise AppError(
            f"{type(self).__name__} has no create_model",
            hint="write one that sets self.model to a compiled Keras model",
        )

    # -- what a user may override -----------------------------------------------------------------------------------

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """What a worker does in a round. Runs on the worker, on the thread that Keras lives on; may be async.

        ``self.indices`` holds the partition: the samples of this round, in their order.

        Args:
            weights: The global weights, one array for each of ``model.weights``.
            worker_epochs: Local epochs in this round.
            batch_size: Samples in a batch.

        Returns:
            The update, weights before minus weights after, one array each; or a tuple of it and a dict of metrics.
        """
        self.model.set_weights(weights)
        metrics = self.replica.fit(worker_epochs, batch_size, list(self.callbacks))
        return [before - after for before, after in zip(weights, self.model.get_weights(), strict=True)], metrics

    def is_convergent(self, record: RoundRecord) -> bool:
        """Whether training can stop. Called on the master after every round (every update in asynchronous training)."""
        return False

    def on_round(self, record: RoundRecord) -> Any:
        """Called on the master after every round; prints its line. May be async."""
        self.say(str(record))

    def on_event(self, event: TrainingEvent) -> None:
        """Called on the master when something happens to a slot or a worker; prints a line for what is out of the ordinary."""
        if event.kind not in ("start", "finish"):
            self.say(f"{event.kind:<9} {event.text}")

    def say(self, text: str) -> None:
        """Print a line, if ``verbose``."""
        if self.verbose:
            print(text, flush=True)

    # -- life -------------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to the workers. Safe to call again."""
        if self.cluster is None:
            self.cluster = default_cluster()
        await self.cluster.connect()

    async def close(self) -> None:
        """Leave the workers; they keep their data for the next run. Safe to call again."""
        if self.cluster is not None:
            await self.cluster.close()

    async def __aenter__(self) -> IApp:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- training ---------------------------------------------------------------------------------------------------

    async def train_model(self) -> list[RoundRecord]:
        """Train as the attributes say, ``mode`` among them."""
        if self.mode not in ("sync", "async"):
            raise ConfigError(f"mode must be 'sync' or 'async', got {self.mode!r}")
        return await (self.train_sync() if self.mode == "sync" else self.train_async())

    async def train_sync(
        self,
        master_epochs: int | None = None,
        worker_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> list[RoundRecord]:
        """Train synchronously: in each round every worker trains on its part, then the updates are merged.

        Args:
            master_epochs: Local epochs of the whole run; so are the others, by default the attributes of the same names.
            worker_epochs: Local epochs in a round.
            batch_size: Per worker.
            seed: Of everything random.

        Returns:
            A record for each round. ``model`` has the final weights.

        Raises:
            DatasetMismatch: Two nodes hold different training data; nothing was trained.
            AppError: The app lacks something.
            RemoteError: The app raised on a worker.
        """
        from ddlf.training import sync

        return await self._train(sync.train, True, master_epochs, worker_epochs, batch_size, seed)

    async def train_async(
        self,
        master_epochs: int | None = None,
        worker_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> list[RoundRecord]:
        """Train asynchronously: each worker's update is merged when it comes, and nobody waits. Otherwise as ``train_sync``.

        Returns:
            A record for each update, in the order in which they were applied.
        """
        from ddlf.training import asynchronous

        return await self._train(asynchronous.train, False, master_epochs, worker_epochs, batch_size, seed)

    async def _train(self, algorithm: Any, backups: bool, *given: int | None) -> list[RoundRecord]:
        names = ("master_epochs", "worker_epochs", "batch_size", "seed")
        from ddlf.algorithms.check import check_policy
        from ddlf.algorithms.merge import rule
        from ddlf.training.exchange import check_codecs
        from ddlf.training.precision import check_precision

        settings = {
            name: getattr(self, name) if value is None else value for name, value in zip(names, given, strict=True)
        }
        for name, value in settings.items():
            low = 0 if name == "seed" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number of {low} or more, got {value!r}")
        if self.balance not in ("equal", "speed"):
            raise ConfigError(f"balance must be 'equal' or 'speed', got {self.balance!r}")
        rule(self.merge)
        check_policy(self.update_policy)
        check_codecs(self.codec, self.weights_codec)
        check_precision(self.precision)
        samples = await self.prepare(settings["seed"])
        async with self._crew(backups) as crew:
            job = await self._job(samples, crew, "sync" if backups else "async", settings)
            try:
                self.history = await algorithm(job)
            finally:
                progress = job.progress
                self.model.set_weights(progress.weights)
                self.optimizers, self.ledger = progress.optimizers, progress.ledger
                if job.keeper is not None:
                    await job.keeper.last(progress)
        return self.history

    def _crew(self, backups: bool) -> Crew:
        from ddlf.training.crew import Crew

        assert self.cluster is not None
        return Crew(
            self.cluster,
            self._open_worker,
            self.on_event,
            backups=backups,
            wait_s=self.wait_for_workers_s,
        )

    async def _job(self, samples: int, crew: Crew, mode: str, settings: dict[str, Any]) -> Job:
        from ddlf.algorithms.merge import rule
        from ddlf.algorithms.outer import Subtract
        from ddlf.training.exchange import WeightsOut
        from ddlf.training.ledger import Ledger
        from ddlf.training.progress import Progress
        from ddlf.training.slots import Job

        assert self.cluster is not None
        trained = {id(weight) for weight in self.model.trainable_weights}
        trainable = [id(weight) in trained for weight in self.model.weights]
        job: Job

        async def evaluate_between(number: int) -> dict[str, float]:
            if not self.evaluate_every or number == 0 or number % self.evaluate_every:
                return {}
            metrics: dict[str, float] = await self._compute(self._evaluate, job.progress.weights)
            return metrics

        async def report(record: RoundRecord) -> bool:
            await _maybe_await(self.on_round(record))
            return bool(self.is_convergent(record))

        keeper, progress = await self._open_checkpoints(mode, samples, settings)
        if progress is None:
            slots = self.slots or self.cluster.N
            progress = Progress(weights=self.model.get_weights(), ledger=Ledger(samples), optimizers=[None] * slots)
        weights_out = WeightsOut(self.weights_codec, [not flag for flag in trainable])
        weights_out.held = dict(progress.held)
        job = Job(
            run=self._run,
            cluster=self.cluster,
            crew=crew,
            slots=len(progress.optimizers),
            progress=progress,
            keeper=keeper,
            lost_of=progress.lost,
            keep_optimizer=self.optimizer_state == "kept",
            trainable=trainable,
            samples=samples,
            names=[weight.path for weight in self.model.weights],
            rule=rule(self.merge),
            update_policy=self.update_policy,
            outer=self.outer or Subtract(),
            codec=self.codec,
            weights_out=weights_out,
            balance=self.balance,
            report=report,
            evaluate_between=evaluate_between,
            **settings,
        )
        return job

    async def _open_checkpoints(
        self, mode: str, samples: int, settings: dict[str, Any]
    ) -> tuple[Keeper | None, Progress | None]:
        """What writes checkpoints, and what the run goes on from; None for each that is not wanted or not there."""
        from ddlf.training.checkpoint import CheckpointFolder
        from ddlf.training.progress import Keeper, Progress, check_settings
        from ddlf.training.replica import describe_weights

        where = self.checkpoint if self.resume in (None, "auto") else self.resume
        if where is None:
            if self.resume:
                raise ConfigError("resume='auto' needs a folder of checkpoints", hint="set checkpoint, too")
            return None, None
        described = describe_weights(self.model)
        now = {
            "mode": mode,
            "samples": samples,
            "data": self._content,
            "model": hashlib.sha256(json.dumps([row[1:] for row in described]).encode()).hexdigest()[:16],
            "optimizer": type(self.model.optimizer).__name__,
            "outer": repr(self.outer),
            **{name: settings[name] for name in ("worker_epochs", "batch_size", "seed")},
            **{
                name: getattr(self, name)
                for name in (
                    "precision",
                    "balance",
                    "codec",
                    "weights_codec",
                    "optimizer_state",
                    "merge",
                    "update_policy",
                )
            },
        }
        folder = CheckpointFolder(where, keep=self.checkpoint_keep)
        await asyncio.to_thread(folder.open, type(self).__name__, takeover=self.takeover)
        try:
            found = await asyncio.to_thread(folder.newest, required=self.resume not in (None, "auto"), report=self.say)
            if found is not None and not self.resume:
                raise ConfigError(
                    f"{where} has checkpoints already, the newest of round {found.round}",
                    hint="go on from there with resume='auto' (--resume auto), or choose another folder",
                )
            progress = None
            if found is not None:
                check_settings(dict(found.facts["settings"]), now)
                progress = Progress.from_checkpoint(found)
                if self.slots not in (None, len(progress.optimizers)):
                    check_settings({"slots": len(progress.optimizers)}, {"slots": self.slots})
                self.say(f"resumed   after {'round' if mode == 'sync' else 'update'} {found.round}, from {where}")
        except BaseException:
            await asyncio.to_thread(folder.close)
            raise

        def report(text: str) -> None:
            self.on_event(TrainingEvent(kind="checkpoint", round=len(self.history), text=text))

        keeper = Keeper(folder, self.checkpoint_every, [row[0] for row in described], now, report)
        if found is not None:
            keeper.resumed_at(found.round)
        return keeper, progress

    async def prepare(self, seed: int | None = None) -> int:
        """Bring every node to where training can begin: connected, model built, data loaded and the same everywhere.

        Args:
            seed: Of the initial weights, when the model is made here; by default the attribute.

        Returns:
            The number of training samples.
        """
        from ddlf.training import replica
        from ddlf.training.precision import WORTH_SAYING
        from ddlf.worker.datasets import fingerprint, not_finite

        for name in ("load_dataset", "create_model"):
            if getattr(type(self), name) is getattr(IApp, name):
                await getattr(self, name)()
        await self.connect()
        assert self.cluster is not None
        begin = time.perf_counter()
        # The workers import Keras and build their models while this side does.
        self._run = secrets.token_hex(8)
        again = self.cluster.options(idempotent=True)  # a worker that dies meanwhile gets it once more
        opening = asyncio.ensure_future(again.run_method(replica.open_app, app=self, run=self._run))
        await asyncio.sleep(0)
        try:
            if not hasattr(self, "x_train"):
                await _maybe_await(self.load_dataset())
            if not hasattr(self, "model"):
                import keras

                keras.utils.set_random_seed(self.seed if seed is None else seed)
                await _maybe_await(self.create_model())
                if not hasattr(self, "model"):
                    raise AppError("create_model set no self.model", hint="end it with self.model = ...")
        except BaseException:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            raise
        opened = await opening
        self._check_models([facts["weights"] for facts in opened])
        threads = sorted({worker.facts["threads"] for worker in self.cluster.workers})
        self.say(
            f"model     {self.model.name}: {self.model.count_params():,} parameters, Keras {opened[0]['keras']} on "
            f"{opened[0]['backend']}, threads per worker {'-'.join(map(str, threads))}, "
            f"ready in {time.perf_counter() - begin:.1f} s"
        )
        if opened[0]["gain"] > WORTH_SAYING:
            self.say(
                f"precision float32; matrix products are {opened[0]['gain']:.1f}x as fast in bfloat16 here: try mixed_bfloat16"
            )
        mine = fingerprint(self.x_train, self.y_train) if hasattr(self, "x_train") else ""
        for name in ("x_train", "y_train") if mine else ():
            if found := not_finite(getattr(self, name)):
                self.say(f"data      WARNING {found} of {name} are NaN or infinite")
        loaded = await again.run_method(replica.load_data, wanted=mine)
        self._check_data(mine, loaded)
        self._content = loaded[0]["fingerprint"]
        samples: int = loaded[0]["samples"]
        news = sum(facts["loaded"] for facts in loaded)
        how = (
            f"loaded on {news} workers in {max(facts['seconds'] for facts in loaded):.1f} s"
            if news
            else f"already on all {len(loaded)} workers, nothing loaded"
        )
        self.say(
            f"data      {samples:,} samples of shape {tuple(loaded[0]['shape'])}, content {loaded[0]['fingerprint']}: {how}"
        )
        return samples

    async def _open_worker(self, worker: ProxyWorker) -> None:
        """Bring one worker to where training is: app, model and data, checked as at the beginning."""
        from ddlf.training import replica
        from ddlf.wire.messages import Request

        facts = await worker.rpc(Request("run_method", replica.open_app, app=self, run=self._run))
        self._check_models([facts["weights"]], worker.id)
        loaded = await worker.rpc(Request("run_method", replica.load_data, wanted=self._content))
        self._check_data(self._content, [loaded], worker.id)

    def _check_models(self, weights: list[list[list[Any]]], first: int = 1) -> None:
        from ddlf.training.replica import describe_weights

        mine = [tuple(row[1:]) for row in describe_weights(self.model)]
        for number, theirs in enumerate(weights, first):
            if [tuple(row[1:]) for row in theirs] != mine:
                raise AppError(
                    f"create_model makes another model on worker {number} ({len(theirs)} weights) than on the master ({len(mine)})",
                    hint="it must not depend on the machine it runs on",
                )

    def _check_data(self, mine: str, loaded: list[dict[str, Any]], first: int = 1) -> None:
        contents = {facts["fingerprint"] for facts in loaded} | ({mine} if mine else set())
        if len(contents) == 1:
            return
        rows = [("master", mine, "", "", "")] if mine else []
        rows += [
            (f"worker {n}", f["fingerprint"], f"{f['samples']:,}", str(tuple(f["shape"])), f["dtype"])
            for n, f in enumerate(loaded, first)
        ]
        table = "\n".join(
            f"  {who:<10} {content:<17} {n:>9} {shape:<18} {dtype}" for who, content, n, shape, dtype in rows
        )
        raise DatasetMismatch(
            f"the training data differs between nodes, so training was not started:\n  {'node':<10} {'content':<17} "
            f"{'samples':>9} {'shape':<18} dtype\n{table}\n",
            hint="give every node the same files, and load them without shuffling by chance",
        )

    # -- after training ---------------------------------------------------------------------------------------------

    async def evaluate_model(self) -> dict[str, float]:
        """Evaluate ``model`` on the test data, on the master.

        Returns:
            Keras's metrics by name, ``"loss"`` among them.
        """
        if not hasattr(self, "x_test") or not hasattr(self, "y_test"):
            raise AppError(
                "there is no test data to evaluate on", hint="set self.x_test and self.y_test in load_dataset"
            )
        metrics: dict[str, float] = await self._compute(self._evaluate, None)
        self.say("test      " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return metrics

    def _evaluate(self, weights: list[Any] | None) -> dict[str, float]:
        import numpy as np

        from ddlf.training.feed import first_array, make_feed

        if weights is not None:
            self.model.set_weights(weights)
        feed = make_feed((self.x_test, self.y_test), EVALUATION_BATCH)
        feed.set_order(np.arange(len(first_array(self.x_test))))
        metrics = self.model.evaluate(feed.dataset, verbose=0, return_dict=True)
        return {name: float(value) for name, value in metrics.items()}

    async def save_model(self, path: str | Path) -> None:
        """Save the model in Keras's format; the file is complete or not there.

        Args:
            path: Ends with ``.keras``.
        """
        path = Path(path)
        if path.suffix != ".keras":
            raise ConfigError(f"a model is saved as a .keras file, got {str(path)!r}")
        temporary = path.with_name(f".{path.stem}.new.keras")
        try:
            await self._compute(self.model.save, temporary)
            temporary.replace(path)
        except FileNotFoundError:
            raise ConfigError(f"the folder of {str(path)!r} does not exist", hint="make it first") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self.say(f"saved     {path}")

    async def load_model(self, path: str | Path) -> None:
        """Take the weights of a saved model, or the whole model when there is none yet. Files that carry code are refused.

        Args:
            path: A ``.keras`` file.
        """
        import keras

        if not Path(path).is_file():  # noqa: ASYNC240
            raise ConfigError(f"there is no model file {str(path)!r}")
        loaded = await self._compute(keras.models.load_model, str(path))
        if hasattr(self, "model"):
            self.model.set_weights(loaded.get_weights())
        else:
            self.model = loaded

    async def _compute(self, function: Any, *args: Any) -> Any:
        """Run Keras on a thread of its own, so that connections are served meanwhile."""
        with ThreadPoolExecutor(1, "compute") as executor:
            return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in MASTER_ONLY and not name.startswith("_")
        }


def default_cluster() -> Cluster:
    """The cluster that is used when none is named: of the configuration if there is one, else two workers on this machine."""
    from ddlf.cluster.cluster import Cluster
    from ddlf.config import find_config

    path = find_config()
    return Cluster.from_config(path) if path is not None else Cluster.local(2)


async def _maybe_await(result: Any) -> None:
    if hasattr(result, "__await__"):
        await result
