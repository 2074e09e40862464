"""Train the published CNN on MNIST, on all workers (515,146 parameters).

    ddlf run apps/mnist_cnn.py --local 2
    ddlf run apps/mnist_cnn.py --config cluster.yaml --master-epochs 10 --mode async

The data comes from the folder $DDLF_DATA (mnist.npz), or is downloaded once on each machine.
"""

import ddlf


class MNISTCNN(ddlf.IApp):
    """The CNN of Phan and Do (2023)."""

    master_epochs = 10
    worker_epochs = 1
    batch_size = 64
    learning_rate = 0.01

    async def load_dataset(self):
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_mnist()

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ],
            name="mnist_cnn",
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(MNISTCNN)
