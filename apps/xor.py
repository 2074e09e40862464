"""The classic demo of a parameter server: 25 replicas of a tiny network learn XOR together, by Downpour SGD.

    python apps/xor.py --local 2
    python apps/xor.py --local 2 --hidden 2                  # as it was published: about one first weights in six does not learn
    python apps/xor.py --local 2 --push-rule sgd:rate=12     # too fast for 25 replicas ...
    python apps/xor.py --local 2 --push-rule sgd:rate=12 --staleness inverse    # ... unless stale pushes count less

Each replica fetches all weights, computes the gradient of one example and pushes it; 50,000 examples in all. Its log shows three steps in a
thousand: between the fetch of a replica and its push stand those of others. The test says how many of the four outputs are within 0.1 of their
targets.
"""

import argparse

import ddlf


class Xor(ddlf.IApp):
    """A network 2-hidden-1 of sigmoids with squared error."""

    mode = "downpour"
    master_epochs = 1
    batch_size = 1
    replicas = 25
    shards = 1  # so that each fetch and each push is one call
    push_rule = "sgd:rate=0.5"
    staleness = "constant"
    warm_start = 0

    examples = 50_000
    hidden = 4
    log_every = 1_000

    def load_dataset(self):
        import numpy as np

        self.x_test = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], "float32")
        self.y_test = np.array([[0], [1], [1], [0]], "float32")
        rows = np.random.default_rng(self.seed).integers(0, 4, self.examples)
        self.x_train, self.y_train = self.x_test[rows], self.y_test[rows]

    def create_model(self):
        import keras
        from keras import layers

        normal = keras.initializers.RandomNormal(stddev=0.2)
        dense = dict(activation="sigmoid", kernel_initializer=normal, bias_initializer=normal)
        self.model = keras.Sequential(
            [keras.Input((2,)), layers.Dense(self.hidden, **dense), layers.Dense(1, **dense)], name="xor"
        )
        self.model.compile(keras.optimizers.SGD(0.5), half_squared_error, metrics=[within])
        self.worker_callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_begin=self.began, on_train_batch_end=self.ended)
        ]

    def began(self, step, logs=None):
        """Runs on a worker in front of each step, as ``ended`` does behind it."""
        if step % self.log_every < 3:
            for layer in range(2):
                print(f"layer {layer} weights read by model replica {self.replica.turn}")

    def ended(self, step, logs=None):
        if step % self.log_every < 3:
            example = step % 4
            output = float(self.model(self.x_test[example : example + 1])[0, 0])
            print(f"replica id {self.replica.turn}, output: {output:.5f}, target {self.y_test[example, 0]:.1f}")
            for layer in reversed(range(2)):
                print(f"layer {layer} weights updated by model replica {self.replica.turn}")


def half_squared_error(target, output):
    import keras

    return keras.ops.square(output - target) / 2


def within(target, output):
    import keras

    return keras.ops.abs(output - target) < 0.1


def units(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--hidden", type=units, metavar="N", help=f"hidden units (default: {Xor.hidden}; as published: 2)"
    )
    ddlf.main(Xor, parser)
