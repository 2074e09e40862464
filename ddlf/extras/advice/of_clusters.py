"""Rules of class C: what is right on one machine and wrong on several. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.rule import Change, Found, Rule

USUAL_WORKERS = 2
"""How many there are taken to be where nothing says it."""
NEAR = 0.05
LONGER = 1.5
FEW_BATCHES = 10
SMALL_BATCH = 16
LARGE = 1_000_000
"""Parameters from which on what an optimizer keeps is worth a word."""
LINK = 125e6
"""Bytes a second on a wire of 1 Gbit/s, which most machines have."""


def _slots(facts: Facts) -> int:
    return int(facts.settings.get("slots") or facts.workers or USUAL_WORKERS)


def _one_process(facts: Facts) -> Iterator[Found]:
    optimizer, slots = facts.optimizer, _slots(facts)
    if optimizer is None or optimizer.steps is None or slots < 2:
        return
    own = facts.steps_of(slots)
    if optimizer.steps > LONGER * own and optimizer.steps <= (1 + NEAR) * facts.steps + 1:
        counted = ", as many as one process would make" if optimizer.steps >= (1 - NEAR) * facts.steps - 1 else ""
        yield Found(
            f"{optimizer.schedule} ends after {optimizer.steps:,} steps{counted}, and each of {slots} slots makes {own:,}",
            ("optimizer", "schedule"),
        )


def _restarted(facts: Facts) -> Iterator[Found]:
    if facts.settings.get("optimizer_state") != "fresh" or facts.optimizer is None:
        return
    if facts.optimizer.keeps == 2:
        yield Found(
            f"optimizer_state is 'fresh', and {facts.optimizer.kind} forgets in each round what it has measured",
            ("setting", "optimizer_state"),
        )


def _few_batches(facts: Facts) -> Iterator[Found]:
    slots, size = _slots(facts), int(facts.settings.get("batch_size", 32))
    batches = facts.samples / (slots * size)
    if facts.samples and batches < FEW_BATCHES and slots > 1:
        yield Found(
            f"{facts.samples:,} samples are {max(1, round(batches))} batches of {size} for each of {slots} slots in an epoch",
            ("setting", "batch_size"),
        )


def _small_batches(facts: Facts) -> Iterator[Found]:
    size = int(facts.settings.get("batch_size", 32))
    rows = min(size, facts.samples // _slots(facts)) if facts.samples else size
    norms = [one for one in facts.layers if one.kind == "BatchNormalization" and one.trained]
    if norms and rows < SMALL_BATCH:
        yield Found(
            f"{norms[0].name!r} normalizes by batches, and those of a slot have {rows} samples",
            ("setting", "batch_size"),
            changes=(Change("setting", 32, "batch_size"),) if rows == size else (),
        )


def _callbacks(facts: Facts) -> Iterator[Found]:
    yield from (Found(sentence, ("setting", "worker_callbacks")) for sentence in facts.worker_callbacks)


def _left_behind(facts: Facts) -> Iterator[Found]:
    yield from (Found(sentence, ("method", "create_model")) for sentence in facts.left_behind)


def _heavy(facts: Facts) -> Iterator[Found]:
    parameters = sum(one.parameters for one in facts.layers)
    optimizer = facts.optimizer
    if (
        optimizer is not None
        and optimizer.keeps == 2
        and parameters >= LARGE
        and facts.settings.get("optimizer_state") == "kept"
    ):
        yield Found(
            f"{optimizer.kind} keeps two numbers for each of {parameters:,}: {12 * parameters / 1e6:,.0f} MB come back from a slot in a round, not "
            f"{4 * parameters / 1e6:,.0f} MB",
            ("setting", "optimizer_state"),
        )


def _does_not_pay(facts: Facts) -> Iterator[Found]:
    step_s, slots, settings = facts.seen.get("step_s"), _slots(facts), facts.settings
    usual = {"mode": "sync", "exchange": "star", "codec": "Float32"}
    if not step_s or slots < 2 or any(settings.get(name) != value for name, value in usual.items()):
        return
    steps = settings.get("worker_steps") or settings["worker_epochs"] * facts.steps_an_epoch / slots
    keeps = 0 if facts.optimizer is None or settings.get("optimizer_state") != "kept" else facts.optimizer.keeps
    size = 4 * (2 + keeps) * sum(one.trained for one in facts.layers)  # there, and back with what the optimizer keeps
    computes, moves = steps * step_s, slots * size / LINK
    if computes + moves > slots * computes:
        yield Found(
            f"in a round {slots} slots compute for {computes:.2g} s, and {slots * size / 1e6:,.0f} MB go to them and back, which takes "
            f"{moves:.2g} s on a wire of 1 Gbit/s: one process alone takes {slots * computes:.2g} s",
            ("method", "create_model"),
        )


def _asked(facts: Facts) -> Iterator[Found]:
    if facts.seen.get("data") or facts.seen.get("model"):  # what differs already is an error of its own
        return
    for sentence in facts.seen.get("asked", ()):
        yield Found(sentence, ("method", sentence.partition(" ")[0]))


def _meets_once(facts: Facts) -> Iterator[Found]:
    settings, slots = facts.settings, _slots(facts)
    epochs, together = int(settings.get("master_epochs", 1)), int(settings.get("worker_epochs") or 1)
    if settings.get("mode") == "sync" and not settings.get("worker_steps") and slots > 1 and together >= max(2, epochs):
        yield Found(
            f"worker_epochs is {together}, of {epochs} in all: {slots} slots train apart to their ends, and are merged once",
            ("setting", "worker_epochs"),
            changes=(Change("setting", 1, "worker_epochs"),),
        )


def _own_train(facts: Facts) -> Iterator[Found]:
    if sentence := facts.seen.get("own_train"):
        fix = "take samples of this slot alone: self.x_train[self.indices]" if "self.indices" in sentence else ""
        yield Found(sentence, ("method", "train"), fix=fix)


def _seen(name: str, at: tuple[str, str]):  # type: ignore[no-untyped-def]
    def look(facts: Facts) -> Iterator[Found]:
        yield from (Found(sentence, at) for sentence in facts.seen.get(name, ()))

    return look


CLUSTER = (
    Rule(
        id="C01",
        severity="E",
        level="cluster",
        title="data that differs between processes",
        look=_seen("data", ("method", "load_dataset")),
        why="A slot is a list of sample numbers. If a number is a different sample on a worker, the slot trains on wrong data.",
        fix="Give each random choice in load_dataset a fixed seed, and sort what you read from a folder or a set.",
        source="measured: DatasetMismatch",
    ),
    Rule(
        id="C02",
        severity="E",
        level="cluster",
        title="a model that differs between processes",
        look=_seen("model", ("method", "create_model")),
        why="Weights are sent as a list, so every worker needs the same number of weights with the same shapes.",
        fix="Make create_model depend only on the app's attributes and data.",
        source="measured: AppError",
    ),
    Rule(
        id="C03",
        severity="E",
        level="cluster",
        title="an app that cannot be pickled",
        look=_seen("travel", ("app", "")),
        why="The app is pickled and sent to the workers before load_dataset runs there.",
        fix="Create objects that cannot be pickled in load_dataset or create_model, not in __init__.",
        source="measured: NotPicklable",
    ),
    Rule(
        id="C04",
        severity="W",
        level="cluster",
        title="files that only this machine has",
        look=_seen("files", ("method", "load_dataset")),
        why="Workers on other machines look for the same path on their own disks.",
        fix="Put the files where all machines can read them, for example below $DDLF_DATA or in a bucket, and read the path from an attribute.",
        source="measured: FileNotFoundError on a worker",
    ),
    Rule(
        id="C05",
        severity="E",
        level="cluster",
        title="code that fails in a new process",
        look=_seen("failed", ("app", "")),
        why="Each worker is a new process without earlier imports or settings.",
        fix="Make load_dataset and create_model set up everything they need.",
        source="measured: RemoteError",
    ),
    Rule(
        id="C06",
        severity="W",
        level="cluster",
        title="a schedule planned for one process",
        look=_one_process,
        why="Each of K slots makes 1/K of the steps, so the learning rate stays high until the end.",
        fix="Divide decay_steps by the number of slots: epochs * samples // (slots * batch_size).",
        source="docs/architecture.md: of n samples a slot makes n / (slots * batch_size) steps an epoch",
    ),
    Rule(
        id="C07",
        severity="I",
        level="cluster",
        title="an optimizer that is reset in each round",
        look=_restarted,
        why="The averages of the gradients that such an optimizer divides by are noise when they are of one round only.",
        fix="Take optimizer_state='kept', or an optimizer without such averages, as SGD.",
        source="docs/reference/settings.md, optimizer_state",
    ),
    Rule(
        id="C08",
        severity="W",
        level="cluster",
        title="few batches per slot",
        look=_few_batches,
        why="An exchange takes as long after two batches as after two hundred, so these rounds are mostly communication.",
        fix="Use a smaller batch_size, fewer slots, or several worker_epochs per round.",
        source="measured: docs/explanation/performance.md",
    ),
    Rule(
        id="C09",
        severity="W",
        level="cluster",
        title="batch normalization of small batches",
        look=_small_batches,
        why="Mean and variance of a few samples are noise, and each slot has its own.",
        fix="Take batches of 32 or more, or GroupNormalization.",
        source="Wu and He, arXiv:1803.08494; arXiv:1910.00189",
    ),
    Rule(
        id="C10",
        severity="W",
        level="cluster",
        title="worker callbacks that stop or slow training",
        look=_callbacks,
        why="A worker sees only its own samples, so it stops, saves or slows down when others do not.",
        fix="Move them to callbacks, which run on the master with the merged metrics.",
        source="docs/howto/train.md, Keras's callbacks",
    ),
    Rule(
        id="C14",
        severity="W",
        level="cluster",
        title="state that slots lose",
        look=_left_behind,
        why="Only the model's weights and the optimizer of compile move with a slot. Other state differs between workers or is lost.",
        fix="Use one optimizer, that of compile, and keep lasting state in float weights.",
        source="docs/howto/train.md, State that is not a weight",
    ),
    Rule(
        id="C11",
        severity="I",
        level="cluster",
        title="optimizer state on the network",
        look=_heavy,
        why="The optimizer state of a slot is sent back with each update.",
        fix="Take optimizer_state='stays', which leaves it on its worker, or SGD with momentum.",
        source="docs/reference/settings.md, optimizer_state",
    ),
    Rule(
        id="C12",
        severity="W",
        level="cluster",
        title="workers slower than one machine",
        look=_does_not_pay,
        why="Sending the weights takes longer than the workers save in computing.",
        fix="Let rounds be longer (worker_epochs), take codec='int8' or optimizer_state='stays', or train it on one machine.",
        source="measured: docs/explanation/performance.md",
    ),
    Rule(
        id="C15",
        severity="W",
        level="cluster",
        title="data or model that depends on the machine",
        look=_asked,
        why="Data and model must be the same on all workers. A machine's name or environment makes them differ.",
        fix="Ask only on the master: in __init__, into an attribute, which is sent with the app, or with -p KEY=VALUE.",
        source="docs/howto/calls.md, Use workers on other machines",
    ),
    Rule(
        id="C16",
        severity="W",
        level="cluster",
        title="slots merged only once",
        look=_meets_once,
        why="The mean of weights that were trained apart for long is a bad model: matching units are at different positions.",
        fix="Use rounds of one or a few epochs: worker_epochs=1.",
        source="McMahan et al., arXiv:1602.05629; Singh and Jaggi, arXiv:1910.05653",
    ),
    Rule(
        id="C13",
        severity="E",
        level="batch",
        title="a train method with a wrong update",
        look=_own_train,
        why="An own train must return the weights before minus those after training on the slot's samples. Any other update is wrong.",
        fix="Begin with self.model.set_weights(weights), and return [before - after, ...] in the order of model.weights.",
        source="docs/howto/train.md, Your own local training",
    ),
)
