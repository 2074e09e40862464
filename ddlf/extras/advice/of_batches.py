"""Rules of level batch: what one batch and some steps have shown (``batch``). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.of_layers import UMLAUT
from ddlf.extras.advice.of_models import AUTOTRAINER
from ddlf.extras.advice.of_samples import plural
from ddlf.extras.advice.rule import Found, Rule

RECIPE = "Karpathy, A Recipe for Training Neural Networks, 2019"
MIXED, FUTURE = 1e-3, 1e-3
DEAD, SATURATED = 0.6, 0.4
SPREAD = 1e4
OFF = 3.0
LEARNT = 0.7
"""Share of the first loss below which learning has begun."""
APART = 10.0
NEAR = 0.01
"""Share of the test's pictures that are nearly those of training, which is more than chance."""


def _nan(facts: Facts) -> Iterator[Found]:
    if where := facts.seen.get("nan"):
        at = ("layer", where) if facts.layer(where) else ("app", "")
        yield Found(f"the first batch gives NaN or infinity, first in {where!r}", at)
        return
    norms = facts.seen.get("gradients") or {}
    if bad := [name for name, norm in norms.items() if not math.isfinite(norm)]:
        names = [layer.name for layer in facts.layers if bad[0].split("/")[-2:-1] == [layer.name]]
        yield Found(
            f"the first batch gives gradients that are NaN or infinite, as that of {bad[0]}",
            ("layer", names[0]) if names else ("method", "create_model"),
        )


def _fails(facts: Facts) -> Iterator[Found]:
    if why := facts.seen.get("fails"):
        yield Found(f"the first batch fails: {why.rstrip('.')}", ("method", "create_model"))


def _has_a_floor(facts: Facts) -> bool:
    """Whether a loss cannot come down to 0, or most weights are not to learn: entropy of targets between 0 and 1, a frozen backbone."""
    kinds = {array.labels.kind for array in facts.of("y", "train") if array.labels is not None}
    soft = any(head.loss in ("bce", "cce") for head in facts.heads) and bool(kinds & {"real", "shares"})
    trained, all_of_them = (sum(getattr(one, name) for one in facts.layers) for name in ("trained", "parameters"))
    return soft or trained < 0.5 * all_of_them


def _by_heart(facts: Facts) -> Iterator[Found]:
    if (
        _has_a_floor(facts)
        or any(array.bad for array in facts.arrays if array.part == "train")
        or facts.seen.get("nan")
    ):
        return
    first, least = facts.seen.get("first", math.nan), facts.seen.get("least", math.nan)
    if first > 0 and not least < LEARNT * first and not math.isnan(least):
        yield Found(
            f"some 260 steps on 16 samples, with Adam at 0.001, 0.01 and 0.1, bring the loss from {first:.4g} to {least:.4g} only",
            ("loss", ""),
        )


def _mixed(facts: Facts) -> Iterator[Found]:
    share = facts.seen.get("mixed", 0.0)
    if share > MIXED:
        yield Found(
            f"outputs of a sample change by {share:.2%} when others of its batch are exchanged",
            ("method", "create_model"),
        )
    elif layer := facts.seen.get("mixing"):
        yield Found(
            f"outputs of {layer!r} for a sample change when others of its batch are exchanged", ("layer", layer)
        )


def _future(facts: Facts) -> Iterator[Found]:
    share = facts.seen.get("future", 0.0)
    if share > FUTURE:
        yield Found(
            f"labels are inputs one place on, and outputs of the first half change by {share:.2%} with inputs of the second",
            ("method", "create_model"),
            fix="mask what comes later: use_causal_mask=True, padding='causal', no Bidirectional",
        )


def _still(facts: Facts) -> Iterator[Found]:
    if any(array.bad for array in facts.arrays if array.part == "train") or facts.seen.get("nan"):
        return
    if unmoved := facts.seen.get("unmoved"):
        yield Found(
            f"in some steps of the model's own {plural(len(unmoved), 'trained weight')} {'stays' if len(unmoved) == 1 else 'stay'} the same, "
            f"while others move: {', '.join(unmoved[:3])}" + (", ..." if len(unmoved) > 3 else ""),
            ("method", "create_model"),
            fix="take gradients of all trainable variables, and apply them to all",
        )
    if facts.seen.get("slopes") is False:
        yield Found(
            "the loss has no gradient for any weight",
            ("loss", ""),
            fix="look for comparisons, argmax, round, casts and NumPy in the loss: none of them has a slope",
        )
        return
    still = list(facts.seen.get("still", ()))
    # A bias alone may cancel out, as where two outputs of one encoder are subtracted.
    still = [path for path in still if not path.endswith("/bias") or f"{path.removesuffix('bias')}kernel" in still]
    if still and facts.seen.get("first", math.nan) > 0:
        names = [layer.name for layer in facts.layers if any(path.split("/")[-2:-1] == [layer.name] for path in still)]
        yield Found(
            f"{plural(len(still), 'trained weight')} {'has' if len(still) == 1 else 'have'} a gradient of 0: {', '.join(still[:3])}"
            + (", ..." if len(still) > 3 else ""),
            ("layer", names[0]) if names else ("method", "create_model"),
        )


def _norms(facts: Facts) -> Iterator[Found]:
    norms = facts.seen.get("gradients") or {}
    if len(norms) < 3:
        return
    (first, a), *_, (last, b) = norms.items()
    if a > 0 and b > 0 and all(map(math.isfinite, (a, b))) and not 1 / SPREAD <= a / b <= SPREAD:
        how = "vanish" if a < b else "explode"
        yield Found(
            f"gradients {how}: the norm is {a:.2g} at {first} and {b:.2g} at {last}", ("method", "create_model")
        )


def _units(facts: Facts, name: str, most: float, what: str) -> Iterator[Found]:
    found = {layer: share for layer, share in (facts.seen.get(name) or {}).items() if share > most}
    if found:
        worst = max(found, key=lambda layer: found[layer])
        yield Found(
            f"{found[worst]:.0%} of {worst!r} {what}"
            + (f", and many in {len(found) - 1} more layers" if len(found) > 1 else ""),
            ("layer", worst),
        )


def _dead(facts: Facts) -> Iterator[Found]:
    if any(one.kind == "BatchNormalization" for one in facts.layers):
        return  # before training its statistics are not those of any batch
    yield from _units(facts, "dead", DEAD, "is 0 for all samples of a batch")


def _saturated(facts: Facts) -> Iterator[Found]:
    yield from _units(facts, "saturated", SATURATED, "is at the end of its activation")


def _first_loss(facts: Facts) -> Iterator[Found]:
    loss = facts.seen.get("loss", math.nan)
    if len(facts.heads) != 1 or facts.heads[0].loss not in ("cce", "sce", "bce") or any(facts.of("w", "train")):
        return
    head = facts.heads[0]
    usual = math.log(2) if head.loss == "bce" else math.log(max(2, head.units))
    penalties = any(one.penalty for one in facts.layers)
    if math.isfinite(loss) and loss > OFF * usual and not penalties and facts.settings.get("class_weight") is None:
        yield Found(
            f"the first loss is {loss:.3g}, and to say nothing in particular gives {usual:.3g}", ("loss", head.name)
        )


def _ignored(facts: Facts) -> Iterator[Found]:
    for name in facts.seen.get("ignored", ()):
        yield Found(f"no output changes with {name}", ("data", name))


def _random(facts: Facts) -> Iterator[Found]:
    if facts.seen.get("random"):
        yield Found("two predictions of the same samples differ, outside of training", ("method", "create_model"))


def _losses(facts: Facts) -> Iterator[Found]:
    losses = {
        name: abs(value) for name, value in (facts.seen.get("losses") or {}).items() if math.isfinite(value) and value
    }
    if len(losses) > 1 and max(losses.values()) > APART * min(losses.values()):
        large, small = (choose(losses, key=lambda name: losses[name]) for choose in (max, min))
        yield Found(
            f"the loss of {large!r} counts {losses[large]:.3g} at first, that of {small!r} {losses[small]:.3g}",
            ("loss", large),
        )


def _near(facts: Facts) -> Iterator[Found]:
    found = facts.seen.get("near")
    if found and found["count"] >= NEAR * found["of"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in found["pairs"])
        yield Found(
            f"{found['count']:,} of {found['of']:,} pictures of x_test are nearly those of x_train (numbers in training and there: {pairs})",
            ("data", "x_test"),
            tuple(b for _, b in found["pairs"]),
        )


BATCH = (
    Rule(
        id="D17",
        severity="W",
        level="batch",
        title="near-duplicate images in training and test",
        look=_near,
        why="The model memorizes an image that was cropped, shifted or saved again like the image itself, so the measured accuracy is too high.",
        fix="Remove them from the test, or keep all versions of an image on one side of the split.",
        source="Barz and Denzler, Do we train on test data?, arXiv:1902.00423: 3.3 % of CIFAR-10's test",
    ),
    Rule(
        id="L13",
        severity="W",
        level="batch",
        title="losses of different sizes",
        look=_losses,
        why="The losses are summed, so the largest one alone trains the shared layers.",
        fix="Set loss_weights that bring them to the same size, or scale the targets.",
        source="Kendall et al., arXiv:1705.07115; WebNNM, 2026",
    ),
    Rule(
        id="M20",
        severity="E",
        level="batch",
        title="NaN in the first batch",
        look=_nan,
        why="What is NaN once stays so, and with it all that is computed of it.",
        fix="Look at what goes into that layer: a logarithm or a root of 0, a division by 0, float16.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="M34",
        severity="E",
        level="batch",
        title="the first step fails",
        look=_fails,
        why="So does the run, which on a cluster is after all machines have loaded their data.",
        fix="Look at the shapes and types of what goes into the layer, the loss or the metric that is named.",
        source=RECIPE,
    ),
    Rule(
        id="M21",
        severity="E",
        level="batch",
        title="the model cannot overfit one batch",
        look=_by_heart,
        why="A model that cannot learn 16 samples, without dropout and augmentation, cannot learn thousands.",
        fix="Look for a loss that does not fit the output, activations that cut gradients, and labels that are not those of the samples.",
        source=RECIPE,
    ),
    Rule(
        id="M22",
        severity="E",
        level="batch",
        title="samples influence each other",
        look=_mixed,
        why="A reshape, a softmax or a sum over the first axis mixes samples, and what comes out depends on who else is in the batch.",
        fix="Leave the first axis alone: name the axes of reshape, softmax, mean and transpose.",
        source=RECIPE,
    ),
    Rule(
        id="M23",
        severity="E",
        level="batch",
        title="the model sees the future",
        look=_future,
        why="The target is among the inputs. The training loss falls to 0, and the model learns nothing useful.",
        fix="Mask later positions: use_causal_mask=True, padding='causal'.",
        source=RECIPE,
    ),
    Rule(
        id="M24",
        severity="E",
        level="batch",
        title="weights without a gradient",
        look=_still,
        why="The loss does not depend on them, or what lies between has no slope: they stay what they were.",
        fix="Look for stop_gradient, argmax, round or casts to whole numbers behind that layer, and for dead units.",
        source=f"{AUTOTRAINER}; {RECIPE}",
    ),
    Rule(
        id="M25",
        severity="W",
        level="batch",
        title="gradients that vanish or explode",
        look=_norms,
        why="One learning rate is for all layers: some stand still while others jump.",
        fix="Normalize between layers, add skips, take relu and he_normal.",
        source=f"{AUTOTRAINER}; WebNNM, 2026",
    ),
    Rule(
        id="M26",
        severity="W",
        level="batch",
        title="dead units",
        look=_dead,
        why="A relu that is 0 for all samples has no gradient and stays 0.",
        fix="Scale inputs, take he_normal, a smaller learning rate, or leaky_relu.",
        source=f"{AUTOTRAINER}; WebNNM, 2026",
    ),
    Rule(
        id="M27",
        severity="W",
        level="batch",
        title="saturated units",
        look=_saturated,
        why="At its ends a sigmoid or a tanh has no slope, and gradients end there.",
        fix="Scale inputs and first weights, normalize before the activation, or take relu.",
        source=f"{AUTOTRAINER}; WebNNM, 2026",
    ),
    Rule(
        id="M28",
        severity="W",
        level="batch",
        title="a high initial loss",
        look=_first_loss,
        why="The model is sure of what is wrong before it has seen anything, and its first steps only undo that.",
        fix="Scale inputs and first weights, and look whether the loss takes what the output is.",
        source=f"{RECIPE}; {UMLAUT}",
    ),
    Rule(
        id="M29",
        severity="W",
        level="batch",
        title="an input that changes nothing",
        look=_ignored,
        why="What it says is lost on the way, as by a multiplication with 0 or a slice.",
        fix="Look at what the model does with it.",
        source=RECIPE,
    ),
    Rule(
        id="M30",
        severity="I",
        level="batch",
        title="randomness outside of training",
        look=_random,
        why="The same sample gets a different prediction each time, so tests cannot be repeated.",
        fix="In your own layer, draw random numbers only if training is true.",
        source=UMLAUT,
    ),
)
