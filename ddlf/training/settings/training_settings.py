"""What training can be told: each setting is declared once, here or in ``ddlf.training.settings.settings``. Runs everywhere; imports
nothing of weight.

Each is declared by its name, its type, the fields of ``Setting``, and its default; below it stands what only the reference says.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from ddlf.training.settings.checks import (
    ARRIVAL,
    CLASS_WEIGHTS,
    CLIP,
    CODEC,
    CONVERGE,
    LOCAL_RULE,
    MERGE,
    MULTIPLIERS,
    OUTER,
    OUTWARD,
    PARTITION,
    PUSHED,
    RATE_DECAY,
    SCHEDULE,
    SHUFFLE,
    STALENESS,
    OneOf,
    Whole,
    count_of_bytes,
)
from ddlf.training.settings.setting import FACT, FILE

if TYPE_CHECKING:
    from ddlf.algorithms.outer import OuterOptimizer


class TrainingSettings:
    """What training can be told. ``Settings`` has the rest."""

    mode: Annotated[
        Literal["sync", "async", "downpour"],
        OneOf("sync", "async", "downpour"),
        "whether updates count once a round (sync), each when it comes (async), or gradients go to shards on the workers (downpour)",
        "",
        FILE | FACT,
    ] = "sync"
    """What ``train_model`` and ``ddlf run`` do."""

    master_epochs: Annotated[int, Whole(1), "local epochs of the whole run", "N", FILE] = 10
    """With ``resume`` set, of the whole training."""

    worker_epochs: Annotated[int, Whole(1), "local epochs in a round", "N", FILE | FACT] = 1
    """A round lies between two exchanges of weights."""

    worker_steps: Annotated[
        int | None,
        Whole(1, none="rounds of worker_epochs"),
        *("batches of each slot in a round, instead of whole epochs", "N", FILE | FACT),
    ] = None
    """An exchange after every N batches: an epoch is cut into rounds, and each of them into slots, so that it has every sample once; its last round
    is shorter. ``master_epochs`` and the numbers that Keras's callbacks get are those of epochs; validation data is evaluated after each epoch."""

    round_samples: Annotated[
        int | None,
        Whole(1, none="rounds of worker_epochs"),
        *("samples of all slots in a round, at most, instead of whole epochs", "N", FILE | FACT),
    ] = None
    """An epoch is cut into as few rounds as that takes, equal but for what cannot be, with exchanges and checkpoints between them."""

    batch_size: Annotated[int, Whole(1), "samples in a batch, of each worker", "N", FILE | FACT] = 32
    """As in the papers: two workers with 64 each step on 128 samples."""

    seed: Annotated[
        int, Whole(0, 2**32 - 1), "seed of first weights, order of samples and all else by chance", "N", FILE | FACT
    ] = 0
    """Equal seeds give equal bits in synchronous training."""

    slots: Annotated[
        int | None,
        Whole(1, none="as many as workers"),
        *("parts of each round, which any worker can compute (default: as many as workers)", "N", FILE | FACT),
    ] = None
    """K, the logical replicas that the workers carry. Workers may come and go: the result depends on K alone. Without a number, workers that come
    later get slots of their own, from a round on that ``history`` names. With one it stays that: more workers are in reserve, fewer take turns."""

    precision: Annotated[
        str,
        OneOf("auto", "float32", "mixed_bfloat16", "mixed_float16"),
        "precision of computation on the workers; auto: float32, and a line when bfloat16 would be faster there",
        *("", FACT),
    ] = "auto"

    balance: Annotated[
        str, OneOf("equal", "speed"), "parts of the data: equal, or as workers are fast (speed)", "", FACT
    ] = "equal"
    """With ``speed`` parts follow each worker's measured speed, so that all end together. Only with ``partition`` at ``equal``: other rules say
    themselves what each slot has. In asynchronous training this is DyLU, dynamic local updates (arXiv:2401.09135), and needs ``worker_steps``: that
    many steps are the fastest slot's, and another one has ``max(1, floor(worker_steps * speed / fastest speed))`` in a round, so that updates are
    hardly stale. The first two rounds are equal, and measure; ``slots`` stays what it is at the beginning."""

    partition: Annotated[
        str, PARTITION, "whose each sample is: equal, dirichlet:0.1, classes:2, power:1", "RULE", FACT
    ] = "equal"
    """For studies of machines whose data differ. With ``equal`` each round has other parts; with any other rule each slot keeps its samples for the
    whole run, K stays what it is at the beginning, and the first lines say what each slot has."""

    shuffle: Annotated[str | None, SHUFFLE, "mixing of files' rows: global, window:8, none", "RULE", FILE | FACT] = None
    """For ``self.train_data`` alone, where it is ``window:8`` by default: files come in another order in each epoch, and so do the rows of 8 files
    that are open together. As ``ddlf data split`` mixes samples as a whole, that is as good as ``global``, with which any sample may follow any
    other, as with arrays, and whose rows are read one by one from the disk. With ``none`` files and rows come as they lie."""

    data_memory: Annotated[
        str | int | None,
        count_of_bytes,
        *(
            "memory of each worker for samples of files (default: an eighth of its machine's, 1 GiB at most)",
            "SIZE",
            FILE,
        ),
    ] = None
    """For what is read ahead, and a window of files where that fits into half of it; else rows are read from the disk, whose cache is not counted."""

    on_bad: Annotated[str, OneOf("stop", "skip"), "damaged partition files: stop, or skip them", "", FILE] = "stop"
    """With ``skip`` each file is read once more, before a sample of it counts; the ledger has what was left out, and is not exact."""

    optimizer_state: Annotated[
        Literal["kept", "stays", "fresh", "averaged"],
        OneOf("kept", "stays", "fresh", "averaged"),
        "whether each slot's optimizer goes on (kept; stays: on its worker), begins anew in each round (fresh) or goes on from the mean (averaged)",
        "",
        FILE | FACT,
    ] = "kept"
    """What is kept comes back with each update (nothing for SGD, as much as the weights with momentum, twice that with Adam) and goes to another
    worker when the slot does. What stays is fetched only when the slot moves, for checkpoints and at the end: an exchange is as small as with SGD.
    When the worker is lost and no checkpoint is of the round before, that optimizer begins anew, and an event says so. With ``averaged``, for
    synchronous training, all slots begin a round with the mean of what they ended the one before with, weighted by samples; of whole numbers, as
    the optimizer's count of steps, with the largest. That goes out with each task, too."""

    local_rule: Annotated[
        str, LOCAL_RULE, "what local training adds to its gradients: plain, fedprox:0.01, scaffold", "RULE", FILE | FACT
    ] = "plain"
    """So that slots do not drift apart in long rounds, or with uneven data. It acts on the gradients that ``model.optimizer`` is given."""

    batchnorm: Annotated[
        str,
        OneOf("averaged", "local", "recalibrated"),
        "batch normalization: averaged, each slot's own (local), or statistics anew after each merge (recalibrated)",
        *("", FACT, "sync"),
    ] = "averaged"
    """With ``local`` moving statistics, scale and offset of ``BatchNormalization`` stay apart in each slot for the whole run, and the model that is
    tested and saved has their mean (FedBN, arXiv:2102.07623). For slots whose data differ. With ``recalibrated`` moving statistics are computed anew
    after each merge: the workers are sent the merged weights and pass the samples of their round through the model once more (SWA,
    arXiv:1803.05407). That costs a forward pass, and the weights go out twice a round; scale and offset are merged as other weights."""

    codec: Annotated[
        str,
        CODEC,
        "codec of updates: float32, float16, bfloat16, int8, int8-block, int4-block, topk:0.01, powersgd:2",
        "NAME",
        FACT,
    ] = "float32"

    weights_codec: Annotated[
        str, OUTWARD, "codec of weights: float32, float16, bfloat16, delta:CODEC", "NAME", FACT
    ] = "float32"
    """After ``delta:`` any codec can stand: the difference to what the worker holds is sent."""

    merge: Annotated[
        str, MERGE, "merge of updates: mean, median, trimmed:0.2, krum, geometric, clipped", "RULE", FACT, "sync"
    ] = "mean"
    """How the updates of a round become one. The mean is weighted by samples; few bad updates cannot move the others far."""

    update_policy: Annotated[
        str, OneOf("stop", "reject", "clip"), "what an update that looks wrong leads to", "", FACT
    ] = "stop"
    """``stop`` ends training on NaN, infinity or a wrong shape, and names worker, tensor and count; ``reject`` also compares lengths and directions
    with the others, has a bad one computed again on another worker, and leaves it out if that does not help; ``clip`` scales what is too long."""

    exchange: Annotated[
        Literal["star", "sharded", "auto", "gradient"],
        OneOf("star", "sharded", "auto", "gradient"),
        "what comes back, and to whom: updates of local training to the master (star), in slices to the workers (sharded), "
        "the faster one of both (auto), or the gradient of one batch, for one common step (gradient)",
        "",
        FILE | FACT,
        "sync",
    ] = "star"
    """With ``sharded`` each worker merges a slice of all updates and gives it to the others, with the bits of ``star``: nothing as large as the model
    goes through the master in a round, which has it after checkpoints and the last round. ``auto`` takes one of both, by what a round has to move,
    and says why. With ``gradient`` the master takes the mean over samples, and one step with the model's own optimizer: that of one process with K
    times the batch. Each step costs an exchange, which local training spares."""

    outer: Annotated[
        "OuterOptimizer | str | None",
        OUTER,
        *("how a merged update changes the weights: subtract, diloco, fedadam", "RULE", FACT),
    ] = None
    """By default it is subtracted."""

    arrival: Annotated[str, ARRIVAL, "how an update that has arrived changes the weights", "RULE", FACT, "async"] = (
        "published"
    )

    staleness: Annotated[
        str | None,
        STALENESS,
        "how much an update counts when others were merged meanwhile: constant, inverse, polynomial:0.5, hinge",
        "RULE",
        FACT,
        "async downpour",
    ] = None
    """An update's staleness is the number of merges between reading the weights that it was made from and applying it; that of a push to a shard the
    number of the shard's steps. None is ``constant`` in asynchronous training, and ``inverse``, which is 1 / max(1, staleness), in Downpour."""

    max_staleness: Annotated[
        int | None,
        Whole(0, none="no limit"),
        *("rounds that a slot may be ahead of the slowest one, for which it then waits", "N", FACT, "async downpour"),
    ] = None
    """With 0 all slots begin each round together and with the same weights, as in synchronous training, but updates are summed as they come."""

    n_fetch: Annotated[
        int, Whole(1), "steps that a replica makes between two fetches of the weights", "N", FILE | FACT, "downpour"
    ] = 1

    n_push: Annotated[
        int, Whole(1), "steps of a replica whose gradients are pushed together", "N", FILE | FACT, "downpour"
    ] = 1
    """A push is their sum."""

    push_rule: Annotated[
        str, PUSHED, "how a push steps the weights of a shard: adagrad, sgd, momentum, adam", "RULE", FACT, "downpour"
    ] = "adagrad"
    """The model's own optimizer says how far a replica goes until its next fetch: by its learning rate, clipping and weight decay."""

    replicas: Annotated[
        int | None,
        Whole(1, none="one in each slot"),
        "replicas of the model, shared out among the slots; on a worker they take turns by chance",
        "N",
        FILE | FACT,
        "downpour",
    ] = None

    shards: Annotated[
        int | None,
        Whole(1, none="one on each worker"),
        *("slices of the weights, each on a worker", "N", FILE | FACT, "downpour"),
    ] = None

    shard_cut: Annotated[
        Literal["equal", "layers"],
        OneOf("equal", "layers"),
        *("where the weights are cut: into equal slices, or where layers end (layers)", "", FILE | FACT, "downpour"),
    ] = "equal"
    """With ``layers`` no layer is on two shards, and these are as equal as that allows."""

    shard_workers: Annotated[
        int | None,
        Whole(1, none="those that train"),
        *("workers of their own for the shards: the last N, which train no slot", "N", FILE, "downpour"),
    ] = None
    """``slots`` are by default as many as the other workers. A shard whose worker is lost goes on where its copy is. Only when no other worker
    is left do these train, too."""

    copies: Annotated[
        int | None,
        Whole(0, none="one, where there is another worker"),
        *("copies of each shard, on other workers", "N", FILE, "downpour"),
    ] = None

    softsync: Annotated[
        int | None,
        Whole(1, none="a step for each push"),
        *("with N, a shard steps by the mean of as many pushes as N goes into the replicas", "N", FACT, "downpour"),
    ] = None

    warm_start: Annotated[
        int | None,
        Whole(0, none="at most 200, and half of the first replica's first round"),
        *("steps of the shards that the first replica makes alone, before the others begin", "N", FACT, "downpour"),
    ] = None
    """It is over with the first slot's first round in any case."""

    evaluate_every: Annotated[
        int, Whole(0), "evaluate the test data after every N rounds; 0: at the end only", "N", FILE
    ] = 0
    """Updates, in asynchronous training. The workers compute the next meanwhile."""

    evaluate_on: Annotated[
        Literal["master", "workers"],
        OneOf("master", "workers"),
        *("where test and validation data are evaluated during training", "", FILE),
    ] = "master"
    """Of ``workers`` each evaluates some of the batches, before or after its next round, to the same bits as the master; a run's last test, with
    ``evaluate_model``, is on the master. Metrics of classes of one's own cannot be shared; then the master evaluates, and a line says why."""

    converge: Annotated[
        str, CONVERGE, "when training can stop before its last epoch: never, target:val_accuracy,0.97,last=5", "RULE"
    ] = "never"
    """Beside ``is_convergent`` of the app: whichever says so first ends it."""

    rate_decay: Annotated[
        str, RATE_DECAY, "how the learning rate falls as epochs pass: never, plateau:0.5,5, webnn", "RULE", FACT
    ] = "never"
    """Once an epoch, on the master, of all slots. ``plateau`` goes by the loss, of ``x_val`` if there is one; ``webnn`` needs it, and accuracy."""

    schedule: Annotated[
        str | None, SCHEDULE, "learning rate over the run: warmup:0.05,cosine; linear, hold, restarts", "RULE", FACT
    ] = None
    """Of the rate that the model is compiled with, in fractions of the run: whatever K, mode and rounds, each slot ends at the end."""

    clip: Annotated[str | None, CLIP, "clipping of gradients: rolling, agc:0.01", "RULE", FACT] = None
    """``rolling`` by the norms of the batches before, ``agc`` by each unit's weights, but for the last layer. It is around the optimizer."""

    multipliers: Annotated[
        str | None, MULTIPLIERS, "length of steps by layer: freeze:0.75, or body=0.1,head=2", "RULE", FACT
    ] = None
    """Layers or weights by name, or by depth: ``freeze`` has the share that stays as it is, in each of equal parts of the run."""

    class_weight: Annotated[Mapping[int, float] | None, CLASS_WEIGHTS, "weights of classes, as in fit", None, FACT] = (
        None
    )
    """Classes that are not in it weigh 1. Or give ``w_train``."""
