"""The settings of training. ``ddlf.training.settings.settings`` has the other settings. Imports nothing heavy.

A declaration has the name, the type, the fields of ``Setting`` and the default. The string below it is extra text for
the reference page.
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
    """The settings of training. ``Settings`` adds the others."""

    mode: Annotated[
        Literal["sync", "async", "downpour"],
        OneOf("sync", "async", "downpour"),
        (
            "how updates are applied: once per round (sync), on arrival (async), or as gradients "
            "pushed to servers on the workers (downpour)"
        ),
        "",
        FILE | FACT,
    ] = "sync"
    """What ``train_model`` and ``ddlf run`` do."""

    master_epochs: Annotated[int, Whole(1), "epochs of training in the whole run", "N", FILE] = 10
    """With ``resume``, this is the total, including the epochs before the checkpoint."""

    worker_epochs: Annotated[int, Whole(1), "epochs of local training per round", "N", FILE | FACT] = 1
    """Workers exchange results once per round."""

    worker_steps: Annotated[
        int | None,
        Whole(1, none="rounds of worker_epochs"),
        *("batches per slot and round, instead of worker_epochs", "N", FILE | FACT),
    ] = None
    """Results are exchanged after every N batches. An epoch is split into rounds and each round into slots, so that
    every sample is used once per epoch; the last round of an epoch is shorter. ``master_epochs`` and the epoch
    numbers in Keras callbacks still count epochs. Validation data is evaluated after each epoch."""

    round_samples: Annotated[
        int | None,
        Whole(1, none="rounds of worker_epochs"),
        *("maximum number of samples per round over all slots, instead of worker_epochs", "N", FILE | FACT),
    ] = None
    """An epoch is split into the smallest number of rounds that respects the limit. The rounds are as equal as
    possible, with exchanges and checkpoints between them."""

    batch_size: Annotated[int, Whole(1), "samples per batch, on each worker", "N", FILE | FACT] = 32
    """As in the papers, two workers with a batch size of 64 each train on 128 samples per step."""

    seed: Annotated[
        int, Whole(0, 2**32 - 1), "random seed for initial weights, sample order and everything else", "N", FILE | FACT
    ] = 0
    """In synchronous training, equal seeds give bit-identical results."""

    slots: Annotated[
        int | None,
        Whole(1, none="as many as workers"),
        *(
            "parts that each round is split into; any worker can compute any part (default: one per worker)",
            "N",
            FILE | FACT,
        ),
    ] = None
    """K, the number of logical replicas. Workers may join and leave: the result depends only on K. If K is not set,
    workers that join later get new slots, from a round that ``history`` names. If K is set, it stays fixed:
    additional workers are spare, and fewer workers take turns."""

    threads: Annotated[
        int | None,
        Whole(1, none="one number for all workers, chosen from cores and slots"),
        *("threads that each worker computes with (default: chosen, equal on all workers)", "N", FILE | FACT),
    ] = None
    """The bits of convolutions depend on the number of threads, so it is equal on all workers. By default a synchronous run uses the cores of its
    smallest machine divided by the slots per machine, and a resumed run the number in its checkpoint. Set a number to get the same bits on other
    machines. In asynchronous and Downpour training, each worker uses its share of its machine's cores by default."""

    precision: Annotated[
        str,
        OneOf("auto", "float32", "mixed_bfloat16", "mixed_float16"),
        "number format of the computation; auto uses float32 and says when bfloat16 would be faster",
        *("", FACT),
    ] = "auto"

    balance: Annotated[
        str,
        OneOf("equal", "speed"),
        "size of each slot's part of the data: equal, or proportional to the speed of its worker (speed)",
        "",
        FACT,
    ] = "equal"
    """With ``speed`` the parts follow the measured speed of each worker, so that all finish together. This requires
    ``partition='equal'``, because other rules assign the samples themselves. In asynchronous training this is DyLU,
    dynamic local updates (arXiv:2401.09135), and requires ``worker_steps``: the fastest slot takes that many steps
    per round, and every other slot ``max(1, floor(worker_steps * speed / fastest speed))``, so that updates are
    hardly stale. The first two rounds are equal and measure the speed; the number of slots stays what it is at the
    start."""

    partition: Annotated[
        str,
        PARTITION,
        "how samples are distributed among the slots: equal, dirichlet:0.1, classes:2, power:1",
        "RULE",
        FACT,
    ] = "equal"
    """For studies with unevenly distributed data. With ``equal`` every round uses another partition. With any other
    rule each slot keeps its samples for the whole run, the number of slots stays fixed, and the first lines of
    output show what each slot has."""

    shuffle: Annotated[
        str | None, SHUFFLE, "how samples from data files are shuffled: global, window:8, none", "RULE", FILE | FACT
    ] = None
    """Only for ``self.train_data``, where the default is ``window:8``: each epoch reads the files in another order
    and shuffles the rows of 8 open files together. Because ``ddlf data split`` shuffles all samples, this is as
    good as ``global``. ``global`` can put any sample after any other, as with arrays, but reads rows one by one
    from the disk. ``none`` reads files and rows in their stored order."""

    data_memory: Annotated[
        str | int | None,
        count_of_bytes,
        *(
            (
                "memory per worker for samples from data files (default: an eighth of the machine's "
                "memory, at most 1 GiB)"
            ),
            "SIZE",
            FILE,
        ),
    ] = None
    """Used for reading ahead, and for the window of files if it fits into half of this memory. Otherwise rows are
    read from the disk, whose cache does not count."""

    on_bad: Annotated[str, OneOf("stop", "skip"), "what to do with a damaged data file", "", FILE] = "stop"
    """``skip`` reads each file once before it uses a sample of it. The ledger records what was left out, and is
    marked as not exact."""

    optimizer_state: Annotated[
        Literal["kept", "stays", "fresh", "averaged"],
        OneOf("kept", "stays", "fresh", "averaged"),
        (
            "what happens to a slot's optimizer state between rounds: kept, kept on its worker "
            "(stays), reset (fresh), averaged"
        ),
        "",
        FILE | FACT,
    ] = "kept"
    """``kept`` sends the state back with each update (nothing for SGD, the size of the weights with momentum, twice
    that for Adam), and on to another worker if the slot moves. ``stays`` fetches it only when the slot moves, for
    checkpoints, and at the end, so that an exchange is as small as with SGD. If the worker is lost and the previous
    round has no checkpoint, that optimizer starts from scratch, and an event says so. ``averaged``, for synchronous
    training, starts all slots of a round with the mean of the states that the previous round ended with, weighted
    by samples. Integers, such as the step count, take the maximum. The state then also goes out with each task."""

    local_rule: Annotated[
        str, LOCAL_RULE, "correction added to local gradients: plain, fedprox:0.01, scaffold", "RULE", FILE | FACT
    ] = "plain"
    """Keeps slots from drifting apart in long rounds or with uneven data. It changes the gradients that
    ``model.optimizer`` receives."""

    batchnorm: Annotated[
        str,
        OneOf("averaged", "local", "recalibrated"),
        (
            "batch normalization: averaged over the slots, kept per slot (local), or recomputed "
            "after each merge (recalibrated)"
        ),
        *("", FACT, "sync"),
    ] = "averaged"
    """``local`` keeps the moving statistics, scale and offset of ``BatchNormalization`` separate for each slot
    during the whole run. The model that is evaluated and saved has their mean (FedBN, arXiv:2102.07623). Use it
    when the slots' data differ. ``recalibrated`` recomputes the moving statistics after each merge: the workers
    receive the merged weights and run the samples of their round through the model once more (SWA,
    arXiv:1803.05407). This costs a forward pass and sends the weights twice per round. Scale and offset are merged
    like other weights."""

    codec: Annotated[
        str,
        CODEC,
        "compression of updates: float32, float16, bfloat16, int8, int8-block, int4-block, topk:0.01, powersgd:2",
        "NAME",
        FACT,
    ] = "float32"

    weights_codec: Annotated[
        str,
        OUTWARD,
        "compression of weights sent to the workers: float32, float16, bfloat16, delta:CODEC",
        "NAME",
        FACT,
    ] = "float32"
    """Any codec can follow ``delta:``, which sends the difference from the weights that the worker already holds."""

    merge: Annotated[
        str,
        MERGE,
        "how the updates of a round are merged: mean, median, trimmed:0.2, krum, geometric, clipped",
        "RULE",
        FACT,
        "sync",
    ] = "mean"
    """The mean is weighted by samples. The other rules limit the influence of a few corrupt updates."""

    update_policy: Annotated[str, OneOf("stop", "reject", "clip"), "what to do with a suspicious update", "", FACT] = (
        "stop"
    )
    """``stop`` ends training on NaN, infinity or a wrong shape, and names the worker, the tensor and the count.
    ``reject`` also compares the length and direction of each update with the others, has a suspicious one
    recomputed on another worker, and drops it if that does not help. ``clip`` scales down updates that are too
    long."""

    exchange: Annotated[
        Literal["star", "sharded", "auto", "gradient"],
        OneOf("star", "sharded", "auto", "gradient"),
        (
            "how workers exchange results: updates through the master (star), updates merged in "
            "slices on the workers (sharded), the faster of these two (auto), or one gradient per "
            "batch (gradient)"
        ),
        "",
        FILE | FACT,
        "sync",
    ] = "star"
    """With ``sharded`` each worker merges one slice of all updates and sends it to the other workers. The result
    has the same bits as with ``star``, but no data of the size of the model passes through the master in a round;
    the master receives the model for checkpoints and after the last round. ``auto`` chooses one of the two by the
    amount of data that a round moves, and says why. With ``gradient`` the master averages the gradients over the
    samples and takes one step with the model's own optimizer, as one process with K times the batch size would.
    Each step costs an exchange, which local training avoids."""

    outer: Annotated[
        "OuterOptimizer | str | None",
        OUTER,
        *(
            "optimizer that applies the merged update to the weights: subtract, diloco, fedadam (default: subtract)",
            "RULE",
            FACT,
        ),
    ] = None
    """An optimizer on the master that treats the merged update as a gradient."""

    arrival: Annotated[str, ARRIVAL, "how an arriving update is applied to the weights", "RULE", FACT, "async"] = (
        "published"
    )

    staleness: Annotated[
        str | None,
        STALENESS,
        "weight of an update that is based on old weights: constant, inverse, polynomial:0.5, hinge",
        "RULE",
        FACT,
        "async downpour",
    ] = None
    """The staleness of an update is the number of merges between reading the weights that it is based on and
    applying it. The staleness of a push is the number of steps that the server took in between. The default is
    ``constant`` in asynchronous training and ``inverse``, which is 1 / max(1, staleness), in Downpour."""

    max_staleness: Annotated[
        int | None,
        Whole(0, none="no limit"),
        *(
            "maximum number of rounds a slot may be ahead of the slowest slot before it waits (default: no limit)",
            "N",
            FACT,
            "async downpour",
        ),
    ] = None
    """With 0 all slots start each round together with the same weights, as in synchronous training, but updates are
    added as they arrive."""

    n_fetch: Annotated[
        int, Whole(1), "steps between two fetches of the weights by a replica", "N", FILE | FACT, "downpour"
    ] = 1

    n_push: Annotated[
        int, Whole(1), "steps whose gradients a replica pushes together", "N", FILE | FACT, "downpour"
    ] = 1
    """A push is the sum of these gradients."""

    push_rule: Annotated[
        str,
        PUSHED,
        "optimizer that the servers apply to pushed gradients: adagrad, sgd, momentum, adam",
        "RULE",
        FACT,
        "downpour",
    ] = "adagrad"
    """Between two fetches a replica steps with the model's own optimizer, including its learning rate, clipping and
    weight decay."""

    replicas: Annotated[
        int | None,
        Whole(1, none="one in each slot"),
        "number of model replicas, distributed among the slots (default: one per slot)",
        "N",
        FILE | FACT,
        "downpour",
    ] = None
    """Replicas on the same worker take turns in random order."""

    shards: Annotated[
        int | None,
        Whole(1, none="one on each worker"),
        *(
            "number of servers that hold the weights, each a part (default: one per worker)",
            "N",
            FILE | FACT,
            "downpour",
        ),
    ] = None

    shard_cut: Annotated[
        Literal["equal", "layers"],
        OneOf("equal", "layers"),
        *(
            "how the weights are divided among the servers: equal parts, or whole layers (layers)",
            "",
            FILE | FACT,
            "downpour",
        ),
    ] = "equal"
    """``layers`` never splits a layer between two servers. The parts are as equal as this allows."""

    shard_workers: Annotated[
        int | None,
        Whole(1, none="those that train"),
        *(
            "number of workers that only hold weights and do not train: the last N of the cluster",
            "N",
            FILE,
            "downpour",
        ),
    ] = None
    """By default ``slots`` is the number of the other workers. If such a worker is lost, its part continues on the
    worker with the copy. These workers train only when no other worker is left."""

    copies: Annotated[
        int | None,
        Whole(0, none="one, where there is another worker"),
        *("copies of each part of the weights, on other workers (default: 1)", "N", FILE, "downpour"),
    ] = None
    """No copies are made if there is only one worker."""

    softsync: Annotated[
        int | None,
        Whole(1, none="a step for each push"),
        *("combine pushes: a server takes one step with the mean of replicas/N pushes", "N", FACT, "downpour"),
    ] = None
    """By default a server takes one step per push."""

    warm_start: Annotated[
        int | None,
        Whole(0, none="at most 200, and half of the first replica's first round"),
        *("steps that the first replica takes alone before the others start", "N", FACT, "downpour"),
    ] = None
    """By default at most 200, and at most half of the first replica's first round. The warm start always ends with
    the first slot's first round."""

    evaluate_every: Annotated[
        int, Whole(0), "evaluate the test data after every N rounds (0: only at the end)", "N", FILE
    ] = 0
    """In asynchronous training N counts updates. The workers compute the next round meanwhile."""

    evaluate_on: Annotated[
        Literal["master", "workers"],
        OneOf("master", "workers"),
        *("where test and validation data are evaluated during training", "", FILE),
    ] = "master"
    """With ``workers`` each worker evaluates some of the batches before or after its next round, and the result has
    the same bits as on the master. The final test, by ``evaluate_model``, is always on the master. Your own metric
    classes cannot be split: then the master evaluates, and a line says why."""

    converge: Annotated[
        str, CONVERGE, "when to stop before the last epoch: never, target:val_accuracy,0.97,last=5", "RULE"
    ] = "never"
    """Training also stops when ``is_convergent`` of the app returns true."""

    rate_decay: Annotated[
        str, RATE_DECAY, "how the learning rate decays with the epochs: never, plateau:0.5,5, webnn", "RULE", FACT
    ] = "never"
    """Decided on the master once per epoch, for all slots. ``plateau`` watches the validation loss, or the training
    loss without ``x_val``. ``webnn`` needs ``x_val`` and an accuracy metric."""

    schedule: Annotated[
        str | None,
        SCHEDULE,
        "learning rate schedule over the run: warmup:0.05,cosine; linear, hold, restarts",
        "RULE",
        FACT,
    ] = None
    """Values are relative to the learning rate of the compiled model, and positions are fractions of the run. So
    every slot reaches the end of the schedule at the end of the run, for any number of slots, mode and round
    length."""

    clip: Annotated[str | None, CLIP, "gradient clipping: rolling, agc:0.01", "RULE", FACT] = None
    """``rolling`` uses the gradient norms of previous batches. ``agc`` uses the norm of each unit's weights, except
    in the last layer. Clipping wraps the optimizer."""

    multipliers: Annotated[
        str | None, MULTIPLIERS, "learning rate multipliers by layer: freeze:0.75, or body=0.1,head=2", "RULE", FACT
    ] = None
    """Layers or weights are selected by name or by depth. ``freeze`` takes the fractions of the layers to freeze,
    one for each of equal parts of the run."""

    class_weight: Annotated[
        Mapping[int, float] | None, CLASS_WEIGHTS, "weight of each class in the loss, as for fit", None, FACT
    ] = None
    """Classes that are not listed have weight 1. ``w_train`` is the alternative."""
