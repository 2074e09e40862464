"""Train a small dense network on MNIST, on all workers (39,760 parameters).

    ddlf run apps/mlp.py --local 2
    ddlf plan apps/mlp.py --local 2

Its steps take so little time that exchanges decide how fast a cluster is.
"""

import ddlf


class MLP(ddlf.IApp):
    """784 inputs, 50 units, 10 classes, trained by plain gradient descent."""

    master_epochs = 10
    batch_size = 100
    learning_rate = 0.1

    async def load_dataset(self):
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_mnist()

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Flatten(),
                layers.Dense(50, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ],
            name="mlp",
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(MLP)
