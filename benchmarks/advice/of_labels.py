"""Defects of labels. The module ``defects`` explains their form."""

from __future__ import annotations

from benchmarks.advice.defects import of

SCALED = 'x = (x / 16).astype("float32")'
TUMOURS_SCALED = "x = (x - mean) / spread\n"
SPLIT = "self.x_train, self.y_train = x[train], y[train]\n"
TARGETS = 'y = ((y - y.mean()) / y.std()).astype("float32")'


LABELS = (
    of("classes counted from one", "digits_mlp", "L03", SCALED, f"{SCALED}\n        y = y + 1"),
    of(
        "labels of -1 and 1 for binary crossentropy",
        "tumours",
        "L03",
        TUMOURS_SCALED,
        f"{TUMOURS_SCALED}        y = 2 * y - 1\n",
    ),
    of(
        "masks of 0 and 255",
        "outlines",
        "L03",
        "self.x_train, self.y_train = x[:500], y[:500]",
        "y = y * 255\n        self.x_train, self.y_train = x[:500], y[:500]",
    ),
    of(
        "labels scaled with the inputs",
        "digits_mlp",
        "L03",
        SCALED,
        f"{SCALED}\n        y = (y / 16).astype('float32')",
    ),
    of("labels as text", "digits_mlp", "D02", SCALED, f"{SCALED}\n        y = np.array([f'digit {{n}}' for n in y])"),
    of("labels of one class only", "digits_mlp", "D13", SCALED, f"{SCALED}\n        y = y * 0"),
    of(
        "labels of another order than the samples",
        "digits_mlp",
        "D18 D07",
        "x, y = x[order], y[order]",
        "x = x[order]",
        level="cluster",
    ),
    of(
        "labels of another order than the samples",
        "tumours",
        "D18 D07",
        'y[order].astype("float32")',
        'y.astype("float32")',
        level="cluster",
    ),
    of(
        "labels moved by one",
        "digits_cnn",
        "D18 D07",
        "data.target[order]",
        "np.roll(data.target[order], 1)",
        level="cluster",
    ),
    of(
        "a third of the labels wrong",
        "digits_mlp",
        "D18",
        SPLIT,
        "y[:1400:3] = np.random.default_rng(1).integers(0, 10, len(y[:1400:3]))\n        " + SPLIT,
        level="cluster",
    ),
    of(
        "equal samples with different labels",
        "tumours",
        "D07",
        TUMOURS_SCALED,
        f"{TUMOURS_SCALED}        x[0:400:2], y[0:400:2] = x[1:400:2], 1 - y[1:400:2]\n",
    ),
    of(
        "targets of another shape",
        "friedman",
        "L04",
        "self.y_train, self.y_test = np.split(y, [1200])",
        "self.y_train, self.y_test = np.split(np.stack([y] * 3, axis=1), [1200])",
    ),
    of("NaN among the targets", "friedman", "D01", TARGETS, f"{TARGETS}\n        y[::200] = np.nan"),
    of("targets that were not scaled", "friedman", "D12", TARGETS, 'y = (y * 1000).astype("float32")'),
)
