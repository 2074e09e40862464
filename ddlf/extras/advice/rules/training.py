"""Rules of class T: optimizer, schedule, batches and settings of the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ddlf.extras.advice.facts import DROPOUT, AppFacts, LayerFacts
from ddlf.extras.advice.rule import Change, Finding, plural, rule

MUCH = 0.8
"""Maximum share of the memory for a step."""
RATES = {
    "SGD": (1e-5, 1.0, 0.01),
    "Adam": (1e-6, 0.02, 0.001),
    "AdamW": (1e-6, 0.02, 0.001),
    "Nadam": (1e-6, 0.02, 0.001),
    "Adamax": (1e-6, 0.05, 0.001),
    "RMSprop": (1e-6, 0.02, 0.001),
    "Adagrad": (3e-3, 1.0, 0.03),
    "Adadelta": (1e-2, 10.0, 1.0),
    "Ftrl": (1e-5, 1.0, 0.001),
    "Lion": (1e-7, 0.003, 0.0001),
}
"""Usual learning rates of an optimizer: the smallest, the largest, and a first choice."""
MOMENTUM = 4.0
"""Maximum of rate / (1 - momentum), as a multiple of the usual maximum rate.

A momentum of 0.9 makes steps 10 times as long.
"""
TOY, TOYS = 20, 5
"""With fewer different samples, a problem counts as a toy problem, like XOR. Its rate may be this multiple of the usual
maximum."""
LONG = 0.99
"""With a larger momentum than this, gradients from hundreds of batches ago still have an effect."""
WAYS = {"SGD": 2.0, "Adam": 0.01, "AdamW": 0.01, "Nadam": 0.01, "Adamax": 0.01, "RMSprop": 0.01}
"""Minimum of rate * steps that changes weights noticeably. In Adam, this product limits the distance that a weight can
move. In SGD, the gradients scale it."""
CLIP = 0.01
DECAY = 0.3
LONGER = 1.5
FEW_BATCHES, TINY_BATCH = 8, 2
FEW_STEPS, LEAST_STEPS = 100, 50
SOME, ENOUGH = 50, 500
CROWDED = 1_000
"""Largest number of trained weights per sample."""
AUGMENTING = (
    "RandomFlip",
    "RandomRotation",
    "RandomTranslation",
    "RandomZoom",
    "RandomCrop",
    "RandomContrast",
    "GaussianNoise",
    "RandAugment",
    "MixUp",
)


@rule("T12", "W", "a step that does not fit into memory")
def _much_memory(facts: AppFacts) -> Iterator[Finding]:
    """The system kills a process that needs more memory than the machine has. A worker then loses all its data.

    Fix: Use a smaller batch_size, or smaller layers.
    Source: 4 bytes for each weight, each gradient, each value of optimizer state, and each output that backpropagation
        needs
    """
    if not facts.memory or not facts.layers:
        return
    rows = min(int(facts.settings.get("batch_size", 32)), facts.samples or 1)
    copies = 2 + (facts.optimizer.keeps if facts.optimizer is not None else 0)  # weights, gradients and optimizer state
    parts = {
        "weights, gradients and optimizer": 4 * copies * sum(layer.parameters for layer in facts.layers),
        f"outputs of all layers for {rows:,} samples": 4 * rows * sum(_values(layer) for layer in facts.layers),
    }
    if sum(parts.values()) > MUCH * facts.memory:
        largest_part, size = max(parts.items(), key=lambda part: part[1])
        yield Finding(
            f"a step takes about {sum(parts.values()) / 1e9:,.0f} GB, most of it for {largest_part} ({size / 1e9:,.0f} GB), and this machine has "
            f"{facts.memory / 1e9:,.0f} GB",
            ("setting", "batch_size") if "samples" in largest_part else ("method", "create_model"),
        )


def _values(layer: LayerFacts) -> int:
    return math.prod(size or 1 for size in layer.shape) if layer.shape else 0


@rule("T01", "W", "an unusual learning rate")
def _rate(facts: AppFacts) -> Iterator[Finding]:
    """Too long steps overshoot the minimum, up to NaN. With too short steps, the run ends before the model has learnt.

    Fix: Start with the usual rate, and change it by factors of 3.
    Source: Zhang et al., UMLAUT, doi:10.1145/3411764.3445538; Bengio, arXiv:1206.5533
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.kind not in RATES or math.isnan(optimizer.rate):
        return
    low, high, usual = RATES[optimizer.kind]
    high *= TOYS if min(facts.samples, facts.rows.distinct or facts.samples) < TOY else 1
    effective = optimizer.rate / max(1 - optimizer.momentum, 1e-6)
    travelled = effective * facts.steps
    is_short = (
        facts.samples >= ENOUGH
        and 0 < travelled < WAYS.get(optimizer.kind, 0.0)
        and optimizer.rate < usual  # otherwise the steps are too few, not too short
        and not facts.from_files
    )
    if low <= optimizer.rate <= high and effective <= MOMENTUM * high and not is_short:
        return
    usually = low <= optimizer.rate <= high
    direction = "high" if optimizer.rate > high or effective > MOMENTUM * high else "low"
    sentence = f"the learning rate of {optimizer.kind} is {optimizer.rate:g}"
    if usually:
        sentence += (
            f", with a momentum of {optimizer.momentum:g}" if direction == "high" else f" in {facts.steps:,} steps"
        )
    changes: tuple[Change, ...] = (Change("rate", usual),)
    if usually and optimizer.momentum > LONG:
        changes = (Change("optimizer", 0.9, argument="momentum"),)
    # plain SGD does not converge in so few steps of the usual size
    elif optimizer.kind == "SGD" and not optimizer.momentum:
        changes += (Change("optimizer", 0.9, argument="momentum"),)
    yield Finding(
        f"{sentence}, which is {direction}: {changes[0].value:g} is usual"
        + (", and without any it learns nothing" if optimizer.rate <= 0 else ""),
        ("optimizer", "rate"),
        changes=changes if not optimizer.schedule and (direction == "high" or usual > optimizer.rate) else (),
        severity="E" if optimizer.rate <= 0 else "I" if usually and direction == "low" else None,
    )


@rule("T02", "W", "float16 without a scaled loss")
def _unscaled_float16(facts: AppFacts) -> Iterator[Finding]:
    """Gradients below 0.00000006 become 0 in float16.

    Fix: Set precision='mixed_float16', so that Keras scales the loss, or use mixed_bfloat16.
    Source: Micikevicius et al., arXiv:1710.03740
    """
    half_precision = [layer for layer in facts.layers if layer.precision == "float16" and layer.trained]
    if half_precision and facts.optimizer is not None and not facts.optimizer.scales_loss:
        yield Finding(
            f"{half_precision[0].name!r}"
            + (f" and {len(half_precision) - 1} more" if len(half_precision) > 1 else "")
            + " compute in float16, and the loss is not scaled",
            ("optimizer", ""),
        )


@rule("T03", "W", "an output in float16")
def _float16_softmax(facts: AppFacts) -> Iterator[Finding]:
    """Exponentials and squares exceed the range of float16, so the loss becomes infinite or 0.

    Fix: Give the last layer dtype='float32'.
    Source: WebNNM, 2026; TensorFlow's guide on mixed precision
    """
    for head in facts.heads:
        layer = facts.layer(head.layer)
        if (
            layer is not None
            and layer.precision == "float16"
            and (head.activation in ("softmax", "sigmoid") or head.loss in ("mse", "poisson"))
        ):
            yield Finding(
                f"the output {head.name!r} is computed in float16, whose values are at most 65,504 and at least 0.00000006",
                ("layer", layer.name),
                changes=(Change("argument", "float32", layer.name, "dtype"),),
            )


@rule("T04", "I", "far more weights than samples, without regularization")
def _crowded(facts: AppFacts) -> Iterator[Finding]:
    """The model can memorize all samples and fail on others.

    Fix: Add dropout, a penalty, augmentation or EarlyStopping, or take a smaller model.
    Source: WebNNM, 2026
    """
    trained = sum(layer.trained for layer in facts.layers)
    regularized = any(layer.kind in DROPOUT or layer.penalty or layer.kind in AUGMENTING for layer in facts.layers)
    decays = facts.optimizer is not None and facts.optimizer.decay > 0
    if (
        facts.samples >= 50
        and trained > CROWDED * facts.samples
        and not regularized
        and not decays
        and not facts.settings.get("callbacks")
    ):
        yield Finding(
            f"{trained:,} numbers are trained on {facts.samples:,} samples, without dropout, penalty or augmentation",
            ("layer", max(facts.layers, key=lambda layer: layer.trained).name),
        )


@rule("T05", "W", "a schedule that is longer than the run")
def _long_schedule(facts: AppFacts) -> Iterator[Finding]:
    """The learning rate stays high, and the run ends before the steps with a low rate, which improve the model most.

    Fix: Set the steps of the schedule to the steps of the run: batches of an epoch times epochs.
    Source: Loshchilov and Hutter, arXiv:1608.03983
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.steps is None or (facts.slots > 1 and optimizer.steps <= facts.steps * LONGER):
        return
    if optimizer.steps > LONGER * facts.steps:
        yield Finding(
            f"{optimizer.schedule} ends after {optimizer.steps:,} steps, and one process makes {facts.steps:,} in this run",
            ("optimizer", "schedule"),
        )


@rule("T07", "W", "a schedule that ends early")
def _ends_early(facts: AppFacts) -> Iterator[Finding]:
    """After the end of the schedule the learning rate is 0 or nearly 0, so all later steps have no effect.

    Fix: Set the steps of the schedule to the steps of a slot: batches of an epoch times epochs, divided by the slots.
    Source: Loshchilov and Hutter, arXiv:1608.03983
    """
    if (optimizer := facts.optimizer) is None:
        return
    end = optimizer.steps if optimizer.schedule in ("CosineDecay", "PolynomialDecay") else None
    for event, steps in (("ends", end), ("is below a hundredth of its first rate", optimizer.fades)):
        if steps is not None and steps * facts.slots * 4 < facts.steps:
            yield Finding(
                f"{optimizer.schedule} {event} after {steps:,} steps, and a slot makes {facts.steps_of(facts.slots):,} in this run",
                ("optimizer", "schedule"),
            )


@rule("T06", "W", "few batches an epoch")
def _few_batches(facts: AppFacts) -> Iterator[Finding]:
    """The run makes one step for each batch. With so few steps it ends before the model has learnt.

    Fix: Use a smaller batch_size, or more epochs and a larger learning rate.
    Source: Masters and Luschi, arXiv:1804.07612
    """
    size = int(facts.settings.get("batch_size", 32))
    at_once = 0 < facts.samples <= size and facts.steps < LEAST_STEPS and not facts.from_files
    if at_once and facts.layers:
        yield Finding(
            f"a batch of {size} has all {facts.samples} samples, so the run makes {plural(facts.steps, 'step')}",
            ("setting", "batch_size"),
            changes=(Change("setting", 32, "batch_size"),),
        )
    elif (
        facts.samples >= ENOUGH and facts.steps_an_epoch < FEW_BATCHES and facts.steps < 1_000 and not facts.from_files
    ):
        yield Finding(
            f"an epoch has {facts.steps_an_epoch} batches of {size}, the run {facts.steps}",
            ("setting", "batch_size"),
            changes=(Change("setting", 32, "batch_size"),),
        )


@rule("M37", "W", "batch normalization of one or two samples")
def _tiny_batches(facts: AppFacts) -> Iterator[Finding]:
    """The mean and the variance of so few samples are mostly noise, and differ from the values that the model uses for
    predictions.

    Fix: Use batches of 32 or more, or GroupNormalization.
    Source: Wu and He, arXiv:1803.08494
    """
    size = int(facts.settings.get("batch_size", 32))
    norms = [layer for layer in facts.layers if layer.kind == "BatchNormalization" and layer.trained]
    if norms and size <= TINY_BATCH:
        yield Finding(
            f"{norms[0].name!r} normalizes by batches of {plural(size, 'sample')}",
            ("setting", "batch_size"),
            changes=(Change("setting", 32, "batch_size"),),
        )


@rule("T08", "W", "gradients clipped to almost nothing")
def _small_clip(facts: AppFacts) -> Iterator[Finding]:
    """With SGD a step is the gradient times the learning rate, so clipped gradients barely move the weights.

    Fix: Set the limit to 1, or to a percentile of the gradient norms that you measure.
    Source: Pascanu et al., arXiv:1211.5063
    """
    if (
        facts.optimizer is not None
        and facts.optimizer.clip is not None
        and facts.optimizer.clip < CLIP
        and facts.optimizer.kind == "SGD"
    ):
        yield Finding(f"gradients are clipped at {facts.optimizer.clip:g}", ("optimizer", "clip"))


@rule("T10", "W", "a weight decay that is too large")
def _large_decay(facts: AppFacts) -> Iterator[Finding]:
    """The decay moves weights to 0 faster than training can change them.

    Fix: Use a weight decay of 0.0001 to 0.1.
    Source: Loshchilov and Hutter, arXiv:1711.05101
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.decay < DECAY or math.isnan(optimizer.rate):
        return
    yield Finding(
        f"weight_decay is {optimizer.decay:g}; 0.0001 to 0.1 is usual",
        ("optimizer", "weight_decay"),
        changes=(Change("optimizer", 0.01, argument="weight_decay"),),
    )


@rule("T09", "W", "a callback that waits for a missing metric")
def _callbacks(facts: AppFacts) -> Iterator[Finding]:
    """Training never reports this metric, so the callback never acts.

    Fix: Name an existing metric, or set x_val and y_val.
    Source: Keras, keras.callbacks
    """
    yield from (Finding(sentence, ("setting", "callbacks")) for sentence in facts.callbacks)


def _class_weights(facts: AppFacts) -> tuple[Mapping[int, float], dict[int, int]]:
    """Return the class weights that the user set, and the number of samples of each class. Both are empty if the user
    set no weights, or the labels are not classes."""
    weights = facts.settings.get("class_weight")
    labels = next((array.labels for array in facts.arrays_of("y", "train")), None)
    if not weights or labels is None or labels.kind not in ("numbers", "one_hot"):
        return {}, {}
    return weights, {number: count for number, count in labels.counts.items() if count}


@rule("T11", "W", "class weights for missing classes")
def _missing_classes(facts: AppFacts) -> Iterator[Finding]:
    """No sample has this class number, so the class that you mean keeps the weight 1.

    Fix: Use the class numbers of y_train, from 0.
    Source: Keras, Model.fit
    """
    weights, counts = _class_weights(facts)
    if unknown := sorted(set(weights) - set(counts)):
        yield Finding(
            f"class_weight has {', '.join(map(str, unknown[:5]))}, and no label has that number",
            ("setting", "class_weight"),
        )


@rule("T13", "W", "reversed class weights")
def _reversed_weights(facts: AppFacts) -> Iterator[Finding]:
    """The frequent class gets even more weight, so the model does not learn the rare class.

    Fix: Give classes with fewer samples larger weights.
    Source: Keras, Model.fit; Lin et al., Focal Loss, arXiv:1708.02002
    """
    weights, counts = _class_weights(facts)
    if len(counts) < 2:
        return
    most, least = max(counts, key=lambda n: counts[n]), min(counts, key=lambda n: counts[n])
    heavy, light = float(weights.get(most, 1.0)), float(weights.get(least, 1.0))
    if counts[most] > 3 * counts[least] and heavy > light:
        yield Finding(
            f"class {most} has {counts[most]:,} samples and the weight {heavy:g}, class {least} has {counts[least]:,} and {light:g}",
            ("setting", "class_weight"),
        )


@rule("T14", "I", "few steps in the whole run")
def _few_steps(facts: AppFacts) -> Iterator[Finding]:
    """Each step moves the weights by about the learning rate, so after so few steps they are near their initial values.

    Fix: Use more epochs or a smaller batch_size.
    Source: Humbatova et al., DeepCrime, ISSTA 2021, doi:10.1145/3460319.3464825: number of epochs
    """
    is_counted = bool(facts.layers) and not facts.from_files and facts.samples >= SOME
    is_one_epoch = facts.settings.get("master_epochs") == 1
    are_few = FEW_BATCHES <= facts.steps < FEW_STEPS if facts.samples >= ENOUGH else facts.steps < LEAST_STEPS
    if is_counted and is_one_epoch and are_few:
        yield Finding(
            f"the run makes {plural(facts.steps, 'step')} in all, and sees each sample once",
            ("setting", "master_epochs"),
        )
