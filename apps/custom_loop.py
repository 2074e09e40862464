"""Train with your own loop instead of ``fit``, on all workers.

python apps/custom_loop.py --local 2
"""

import ddlf


class CustomLoop(ddlf.IApp):
    """The master merges the results of ``train`` of all workers. Everything else works like with ``fit``."""

    master_epochs = 6
    worker_epochs = 2
    batch_size = 32
    learning_rate = 0.05

    def load_dataset(self):  # runs on the master and on every worker
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_digits()

    def create_model(self):  # so does this
        import keras
        import tensorflow as tf
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10, "softmax")],
            name="custom_loop",
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])
        self.step = tf.function(self.one_step, reduce_retracing=True)

    def one_step(self, x, y):
        """One batch: change here what you want to do in another way than Keras."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(x, y, self.model(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.model.trainable_variables), 1.0)
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def train(self, weights, worker_epochs, batch_size):
        """Runs on a worker, in each round; ``self.indices`` are its samples of this round."""
        import numpy as np

        self.model.set_weights(weights)
        losses = []
        for _ in range(worker_epochs):
            order = np.random.permutation(self.indices)  # seeded for each round: runs can be repeated
            for begin in range(0, len(order), batch_size):
                batch = order[begin : begin + batch_size]
                losses.append(float(self.step(self.x_train[batch], self.y_train[batch])))
        update = [before - after for before, after in zip(weights, self.model.get_weights(), strict=True)]
        return update, {"loss": float(np.mean(losses))}


if __name__ == "__main__":
    ddlf.main(CustomLoop)
