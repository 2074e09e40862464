"""Five ways to train one network on MNIST, side by side: accuracy over time and bytes.

    python apps/mnist_distbelief.py --local 2
    python apps/mnist_distbelief.py --local 2 --model lstm -p epochs=3
    python apps/mnist_distbelief.py --local 2 -p ways=sync,default -p replicas=2
    ddlf run apps/mnist_distbelief.py --local 2 --mode downpour             # one way alone, with all options

``sync`` merges local training after each epoch. Three ways are Downpour SGD: ``downpour`` with plain SGD on the shards,
``adagrad``, and ``default``, which has Adagrad, a warm start, and less weight for stale pushes. With many replicas,
``downpour`` does not learn at this rate, and ``adagrad`` learns only if the replicas push in random order
(``benchmarks/downpour.py``). ``sandblaster`` is L-BFGS. Each of its steps uses all samples, so it makes several steps for
each epoch of the other ways, and its network has no dropout. Training stops early when validation does not improve, and
keeps the best weights.
"""

import argparse
import time

import ddlf
from ddlf.errors import ConfigError

PLAIN = dict(mode="downpour", staleness="constant", warm_start=0)
WAYS = {
    "sync": dict(mode="sync"),
    "downpour": dict(PLAIN, push_rule="sgd:rate=0.2"),
    "adagrad": dict(PLAIN, push_rule="adagrad:rate=0.05"),
    "default": dict(mode="downpour", push_rule="adagrad:rate=0.05"),
    "sandblaster": dict(mode="lbfgs", dropout=0.0),
}
STEPS = 10
"""Iterations of L-BFGS for each epoch of the other ways."""
MODELS = ["dense", "lstm"]
VALIDATION = 1_000


class Mnist(ddlf.IApp):
    """A dense network of 79,510 parameters, or an LSTM that reads an image line by line; both with dropout, except for L-BFGS."""

    batch_size = 32
    learning_rate = 0.1
    evaluate_every = 1

    samples = 60_000
    network = "dense"
    dropout = 0.2
    patience = 2
    curve = None  # of each look seconds, MB to and from the master and among the workers, and accuracy; None: not beside others

    def load_dataset(self):
        (x, y), (self.x_test, self.y_test) = ddlf.load_mnist()
        x, y = x[: self.samples], y[: self.samples]
        self.x_train, self.y_train = x[:-VALIDATION], y[:-VALIDATION]
        self.x_val, self.y_val = x[-VALIDATION:], y[-VALIDATION:]

    def create_model(self):
        import keras
        from keras import layers

        hidden = {
            "dense": [layers.Flatten(), layers.Dense(100, activation="relu")],
            "lstm": [layers.Reshape((28, 28)), layers.LSTM(64)],
        }[self.network]
        output = [*[layers.Dropout(self.dropout)] * bool(self.dropout), layers.Dense(10, activation="softmax")]
        self.model = keras.Sequential([keras.Input((28, 28, 1)), *hidden, *output], name=f"mnist_{self.network}")
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])
        self.values = self.model.count_params()
        self.callbacks = [
            keras.callbacks.EarlyStopping("val_accuracy", patience=self.patience, restore_best_weights=True)
        ]

    def on_round(self, record):
        """Record the result so far, after a round of ``sync``, or of one slot in Downpour."""
        if self.curve is None:
            super().on_round(record)
            return
        # All but what a worker has itself goes to another one. In a pass of L-BFGS a worker fetches the weights and pushes a sum of 8 bytes
        # a value; at the end of a step, weights and gradient go to the copies.
        passes = record.metrics.get("passes", 0)
        models = len(record.pushes) + len(record.fetches) + passes * self.cluster.N * 3 + 2 * bool(passes)
        between = models * 4 * self.values * (1 - 1 / self.cluster.N) / 1e6
        before = self.curve[-1] if self.curve else (0.0, 0.0, 0.0, 0.0)
        master = (record.bytes_out + record.bytes_back) / 1e6
        seconds, accuracy = time.perf_counter() - self.began, record.test["accuracy"]
        self.curve.append((seconds, before[1] + master, before[2] + between, accuracy))
        print(
            f"{seconds:8.1f} s {self.curve[-1][1]:9.1f} MB {self.curve[-1][2]:9.1f} MB {100 * accuracy:9.2f} %",
            flush=True,
        )


async def main(
    cluster: ddlf.Cluster,
    model: str = "dense",
    ways: str = ",".join(WAYS),
    epochs: int = 4,
    replicas: int = 16,
    samples: int = 60_000,
    seed: int = 0,
) -> None:
    """Train in each way, from the same first weights, and print the result of each way.

    ``sandblaster`` makes ``STEPS`` iterations for each of the epochs.

    Args:
        cluster: The workers.
        model: ``dense`` or ``lstm``.
        ways: Names of ways, with commas between them.
        epochs: Maximum number of passes over the samples.
        replicas: Number of replicas of Downpour, on all workers together.
        samples: Number of samples of MNIST. 1,000 of them are for validation.
        seed: Seed of the first weights and of all random choices.
    """
    for name, choices in [*((way, WAYS) for way in ways.split(",")), (model, MODELS)]:
        if name not in choices:
            raise ConfigError(f"there is no {name!r} here: choose of {', '.join(choices)}")
    if samples <= VALIDATION:
        raise ConfigError(f"samples={samples} leave nothing to train on: {VALIDATION:,} of them are for validation")
    ended = {}
    for way in ways.split(","):
        app = Mnist(cluster)
        app.network, app.samples, app.master_epochs, app.seed = model, samples, epochs, seed
        for name, value in WAYS[way].items():
            setattr(app, name, value)
        if app.mode == "downpour":
            app.replicas = replicas
        if app.mode == "lbfgs":
            app.master_epochs *= STEPS
        app.verbose, app.curve = False, []
        await app.prepare()
        print(f"\n{way}\n   training  to the master  among workers  accuracy")
        app.began = time.perf_counter()
        await app.train_model()
        ended[way] = (*app.curve[-1][:3], (await app.evaluate_model())["accuracy"])
    print(f"\n{'way':<10} {'seconds':>8} {'MB, master':>11} {'MB, workers':>12} {'accuracy':>9}")
    for way, (seconds, master, between, accuracy) in ended.items():
        print(f"{way:<10} {seconds:8.1f} {master:11.1f} {between:12.1f} {100 * accuracy:8.2f}%")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", choices=MODELS, help="what is trained (default: dense)")
    ddlf.main(main, parser)
