"""Rules of class C: apps that are right on one machine and wrong on several. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.algorithms.codec import Float32
from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.rule import Change, Finding, rule
from ddlf.training.registry import MODE, SETTINGS

USUAL_WORKERS = 2
"""The assumed number of workers, if it is unknown."""
NEAR = 0.05
LONGER = 1.5
FEW_BATCHES = 10
SMALL_BATCH = 16
LARGE = 1_000_000
"""From this number of parameters on, the size of the optimizer state is reported."""
LINK = 125e6
"""Bytes per second of a network with 1 Gbit/s, which most machines have."""


def _slots(facts: AppFacts) -> int:
    return int(facts.settings.get("slots") or facts.workers or USUAL_WORKERS)


@rule("C06", "W", "a schedule planned for one process", level="cluster")
def _one_process(facts: AppFacts) -> Iterator[Finding]:
    """Each of K slots makes only 1/K of the steps, so the learning rate stays high until the end.

    Fix: Divide decay_steps by the number of slots: epochs * samples // (slots * batch_size).
    Source: docs/architecture.md: of n samples a slot makes n / (slots * batch_size) steps an epoch
    """
    optimizer, slots = facts.optimizer, _slots(facts)
    if optimizer is None or optimizer.steps is None or slots < 2:
        return
    slot_steps = facts.steps_of(slots)
    if optimizer.steps > LONGER * slot_steps and optimizer.steps <= (1 + NEAR) * facts.steps + 1:
        counted = ", as many as one process would make" if optimizer.steps >= (1 - NEAR) * facts.steps - 1 else ""
        yield Finding(
            f"{optimizer.schedule} ends after {optimizer.steps:,} steps{counted}, and each of {slots} slots makes {slot_steps:,}",
            ("optimizer", "schedule"),
        )


@rule("C07", "I", "an optimizer that is reset in each round", level="cluster")
def _restarted(facts: AppFacts) -> Iterator[Finding]:
    """Such an optimizer divides by averages of the gradients. The averages of a single round are mostly noise.

    Fix: Set optimizer_state='kept', or use an optimizer without such averages, such as SGD.
    Source: docs/reference/settings.md, optimizer_state
    """
    if facts.settings.get("optimizer_state") != "fresh" or facts.optimizer is None:
        return
    if facts.optimizer.keeps == 2:
        yield Finding(
            f"optimizer_state is 'fresh', and {facts.optimizer.kind} loses its averages of the gradients in each round",
            ("setting", "optimizer_state"),
        )


@rule("C08", "W", "few batches per slot", level="cluster")
def _few_batches(facts: AppFacts) -> Iterator[Finding]:
    """An exchange takes the same time after two batches as after two hundred, so these rounds consist mostly of
    communication.

    Fix: Use a smaller batch_size, fewer slots, or several worker_epochs per round.
    Source: measured: docs/explanation/performance.md
    """
    slots, size = _slots(facts), int(facts.settings.get("batch_size", 32))
    batches = facts.samples / (slots * size)
    if facts.samples and batches < FEW_BATCHES and slots > 1:
        yield Finding(
            f"{facts.samples:,} samples are {max(1, round(batches))} batches of {size} for each of {slots} slots in an epoch",
            ("setting", "batch_size"),
        )


@rule("C09", "W", "batch normalization of small batches", level="cluster")
def _small_batches(facts: AppFacts) -> Iterator[Finding]:
    """The mean and the variance of a few samples are mostly noise, and each slot computes its own.

    Fix: Take batches of 32 or more, or GroupNormalization.
    Source: Wu and He, arXiv:1803.08494; arXiv:1910.00189
    """
    size = int(facts.settings.get("batch_size", 32))
    rows = min(size, facts.samples // _slots(facts)) if facts.samples else size
    norms = [layer for layer in facts.layers if layer.kind == "BatchNormalization" and layer.trained]
    if norms and rows < SMALL_BATCH:
        yield Finding(
            f"{norms[0].name!r} normalizes by batches, and those of a slot have {rows} samples",
            ("setting", "batch_size"),
            changes=(Change("setting", 32, "batch_size"),) if rows == size else (),
        )


@rule("C10", "W", "worker callbacks that stop or slow training", level="cluster")
def _callbacks(facts: AppFacts) -> Iterator[Finding]:
    """A worker sees only its own samples, so its callbacks stop training, save or change the learning rate at other
    times than the callbacks of other workers.

    Fix: Move them to callbacks, which run on the master with the merged metrics.
    Source: docs/howto/train.md, Keras's callbacks
    """
    yield from (Finding(sentence, ("setting", "worker_callbacks")) for sentence in facts.worker_callbacks)


@rule("C14", "W", "state that slots lose", level="cluster")
def _left_behind(facts: AppFacts) -> Iterator[Finding]:
    """Only the model's weights and the optimizer of compile move with a slot. Other state differs between workers or is
    lost.

    Fix: Use only the optimizer of compile, and keep lasting state in weights of a float type.
    Source: docs/howto/train.md, State that is not a weight
    """
    yield from (Finding(sentence, ("method", "create_model")) for sentence in facts.left_behind)


@rule("C11", "I", "optimizer state on the network", level="cluster")
def _heavy(facts: AppFacts) -> Iterator[Finding]:
    """Each slot sends its optimizer state back with each update.

    Fix: Set optimizer_state='stays', which leaves the state on its worker, or use SGD with momentum.
    Source: docs/reference/settings.md, optimizer_state
    """
    parameters = sum(layer.parameters for layer in facts.layers)
    optimizer = facts.optimizer
    if (
        optimizer is not None
        and optimizer.keeps == 2
        and parameters >= LARGE
        and facts.settings.get("optimizer_state") == "kept"
    ):
        yield Finding(
            f"{optimizer.kind} keeps two numbers for each of {parameters:,}: {12 * parameters / 1e6:,.0f} MB come back from a slot in a round, not "
            f"{4 * parameters / 1e6:,.0f} MB",
            ("setting", "optimizer_state"),
        )


@rule("C12", "W", "workers slower than one machine", level="cluster")
def _does_not_pay(facts: AppFacts) -> Iterator[Finding]:
    """Sending the weights takes longer than the workers save in computing. The times are those of ddlf plan, if it has
    measured this app on these workers.

    Fix: Make rounds longer (worker_epochs), set codec='int8' or optimizer_state='stays', or train on one machine.
    Source: measured: docs/explanation/performance.md
    """
    step_s, slots, settings = facts.observations.get("step_s"), _slots(facts), facts.settings
    defaults = {name: SETTINGS[name].default for name in ("mode", "exchange")} | {"codec": Float32.__name__}
    if not step_s or slots < 2 or any(settings.get(name) != value for name, value in defaults.items()):
        return
    steps = settings.get("worker_steps") or settings.get("worker_epochs", 1) * facts.steps_an_epoch / slots
    keeps = 0 if facts.optimizer is None or settings.get("optimizer_state") != "kept" else facts.optimizer.keeps
    size = 4 * (2 + keeps) * sum(layer.trained for layer in facts.layers)  # weights, update and state
    moves, how = slots * size / LINK, "on a wire of 1 Gbit/s"
    if (planned := facts.observations.get("planned")) is not None:
        step_s, moves, how = planned
    computes = steps * step_s
    if computes + moves > slots * computes:
        yield Finding(
            f"in a round {slots} slots compute for {computes:.2g} s, and {slots * size / 1e6:,.0f} MB go to them and back, which takes "
            f"{moves:.2g} s {how}: one process alone takes {slots * computes:.2g} s",
            ("method", "create_model"),
        )


@rule("C16", "W", "slots merged only once", level="cluster")
def _meets_once(facts: AppFacts) -> Iterator[Finding]:
    """The mean of weights that were trained separately for a long time is a bad model: equivalent units are at
    different positions.

    Fix: Use rounds of one or a few epochs: worker_epochs=1.
    Source: McMahan et al., arXiv:1602.05629; Singh and Jaggi, arXiv:1910.05653
    """
    settings, slots = facts.settings, _slots(facts)
    epochs, together = int(settings.get("master_epochs", 1)), int(settings.get("worker_epochs") or 1)
    in_rounds = "mode" in settings and MODE.kind(settings["mode"]).in_rounds
    if in_rounds and not settings.get("worker_steps") and slots > 1 and together >= max(2, epochs):
        yield Finding(
            f"worker_epochs is {together}, of {epochs} in all: {slots} slots train apart to their ends, and are merged once",
            ("setting", "worker_epochs"),
            changes=(Change("setting", 1, "worker_epochs"),),
        )


@rule("C13", "E", "a train method with a wrong update", level="batch")
def _own_train(facts: AppFacts) -> Iterator[Finding]:
    """Your own train must return the weights before training minus the weights after training on the slot's samples.
    Any other update is wrong.

    Fix: Begin with self.model.set_weights(weights), and return [before - after, ...] in the order of model.weights.
    Source: docs/howto/train.md, Your own local training
    """
    if sentence := facts.observations.get("own_train"):
        fix = "use only the samples of this slot: self.x_train[self.indices]" if "self.indices" in sentence else ""
        yield Finding(sentence, ("method", "train"), fix=fix)


def _observed(facts: AppFacts, name: str, subject: tuple[str, str]) -> Iterator[Finding]:
    yield from (Finding(sentence, subject) for sentence in facts.observations.get(name, ()))


@rule("C01", "E", "data that differs between processes", level="cluster")
def _different_data(facts: AppFacts) -> Iterator[Finding]:
    """A slot is a list of sample numbers. If a number means another sample on a worker, the slot trains on wrong data.

    Fix: Give each random choice in load_dataset a fixed seed, and sort what you read from a folder or a set.
    Source: measured: DatasetMismatch
    """
    yield from _observed(facts, "data", ("method", "load_dataset"))


@rule("C02", "E", "a model that differs between processes", level="cluster")
def _different_model(facts: AppFacts) -> Iterator[Finding]:
    """Weights are sent as a list, so every worker needs the same number of weights with the same shapes.

    Fix: Make create_model depend only on the app's attributes and data.
    Source: measured: AppError
    """
    yield from _observed(facts, "model", ("method", "create_model"))


@rule("C03", "E", "an app that cannot be pickled", level="cluster")
def _not_picklable(facts: AppFacts) -> Iterator[Finding]:
    """The app is pickled and sent to the workers before load_dataset runs there.

    Fix: Create objects that cannot be pickled in load_dataset or create_model, not in __init__.
    Source: measured: NotPicklable
    """
    yield from _observed(facts, "travel", ("app", ""))


@rule("C04", "W", "files that only this machine has", level="cluster")
def _local_files(facts: AppFacts) -> Iterator[Finding]:
    """Workers on other machines look for the same path on their own disks.

    Fix: Put the files where all machines can read them, for example below $DDLF_DATA or in a bucket, and read the path
        from an attribute.
    Source: measured: FileNotFoundError on a worker
    """
    yield from _observed(facts, "files", ("method", "load_dataset"))


@rule("C05", "E", "code that fails in a new process", level="cluster")
def _fails_in_new_process(facts: AppFacts) -> Iterator[Finding]:
    """Each worker is a new process without earlier imports or settings.

    Fix: Make load_dataset and create_model set up everything they need.
    Source: measured: RemoteError
    """
    yield from _observed(facts, "failed", ("app", ""))
