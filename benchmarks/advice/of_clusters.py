"""Defects that only show on several machines. The module ``defects`` explains their form."""

from __future__ import annotations

from benchmarks.advice.defects import CLUSTER, of

WIDE, NARROW = 'layers.Dense(64, activation="relu")', 'layers.Dense(32, activation="relu")'
SCALED = 'x = (x / 16).astype("float32")'
BENIGN, HIDDEN = (
    'layers.Dense(1, activation="sigmoid", name="benign")',
    'layers.Dense(16, activation="relu", name="hidden")',
)
SETTINGS = "    batch_size = 32\n"
INIT = "\n    def __init__(self, cluster=None):\n        super().__init__(cluster)\n        {}\n"
STEPS = "steps = self.master_epochs * len(self.x_train) // (self.slots * self.batch_size)"


CLUSTERS = (
    of("data by chance", "digits_mlp", "C01", "np.random.default_rng(0)", "np.random.default_rng()", nature=CLUSTER),
    of(
        "data in the order of a set",
        "digits_mlp",
        "C01",
        SCALED,
        f"{SCALED}\n        names = sorted(range(len(x)), key=lambda n: hash(str(n)))\n        x, y = x[names], y[names]",
        nature=CLUSTER,
    ),
    of(
        "a model by chance",
        "digits_mlp",
        "C02",
        NARROW,
        'layers.Dense(int(np.random.default_rng().integers(20, 90000)), activation="relu")',
        nature=CLUSTER,
    ),
    of(
        "a model by the process",
        "tumours",
        "C02",
        HIDDEN,
        'layers.Dense(16 + os.getpid() % 97, activation="relu", name="hidden")',
        "import numpy as np\n",
        "import numpy as np\nimport os\n",
        nature=CLUSTER,
    ),
    of(
        "a lock in the app",
        "digits_mlp",
        "C03",
        SETTINGS,
        SETTINGS + INIT.format("self.lock = threading.Lock()"),
        "import numpy as np\n",
        "import numpy as np\nimport threading\n",
        nature=CLUSTER,
    ),
    of(
        "an open file in the app",
        "tumours",
        "C03",
        "    batch_size = 16\n",
        "    batch_size = 16\n" + INIT.format("self.log = open('log.txt', 'w')"),
        nature=CLUSTER,
    ),
    of(
        "a file of this machine",
        "digits_mlp",
        "C04",
        SCALED,
        f"np.save('digits.npy', x)\n        x = np.load('digits.npy')\n        {SCALED}",
        nature=CLUSTER,
    ),
    of(
        "a name that only the script registers",
        "digits_mlp",
        "C05",
        NARROW,
        'layers.Dense(32, activation=keras.saving.get_custom_objects()["soft"])',
        SETTINGS,
        SETTINGS + INIT.format('keras.saving.get_custom_objects()["soft"] = keras.activations.softplus'),
        nature=CLUSTER,
    ),
    of(
        "a file that is gone after it was read",
        "tumours",
        "C05 C04",
        "x, y = load_breast_cancer(return_X_y=True)",
        "x, y = np.load('once.npy'), load_breast_cancer(return_X_y=True)[1]\n        os.remove('once.npy')",
        "import numpy as np\n",
        "import os\n\nimport numpy as np\n",
        "    batch_size = 16\n",
        "    batch_size = 16\n" + INIT.format("np.save('once.npy', load_breast_cancer().data)"),
        nature=CLUSTER,
    ),
    of(
        "a schedule of one process",
        "scheduled",
        "C06",
        STEPS,
        "steps = self.master_epochs * len(self.x_train) // self.batch_size",
        nature=CLUSTER,
    ),
    of(
        "an optimizer that restarts",
        "scheduled",
        "C07",
        "    slots = 2\n",
        '    slots = 2\n    optimizer_state = "fresh"\n',
        nature=CLUSTER,
    ),
    of("few batches for each slot", "digits_cnn", "C08 T06", SETTINGS, "    batch_size = 128\n", nature=CLUSTER),
    of("small batches that are normalized", "residual", "C09", SETTINGS, "    batch_size = 4\n", nature=CLUSTER),
    of(
        "a worker stops by its own part",
        "digits_mlp",
        "C10",
        'metrics=["accuracy"])\n',
        'metrics=["accuracy"])\n        self.worker_callbacks = [keras.callbacks.EarlyStopping("loss", patience=1)]\n',
        nature=CLUSTER,
    ),
    of(
        "an optimizer that triples what travels",
        "digits_mlp",
        "C11",
        WIDE,
        'layers.Dense(20_000, activation="relu")',
        NARROW,
        "layers.Dropout(0.3)",
        nature=CLUSTER,
    ),
    of(
        "a network that takes longer to send than to train",
        "digits_mlp",
        "C12",
        "slice(0, 1400)",
        "slice(0, 150)",
        WIDE,
        'layers.Dense(2000, activation="relu")',
        NARROW,
        'layers.Dense(2000, activation="relu")',
        nature=CLUSTER,
    ),
)
