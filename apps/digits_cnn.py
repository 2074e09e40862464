"""Train a small CNN on handwritten digits: real data that comes with DDLF, so nothing is downloaded.

python apps/digits_cnn.py --local 2
"""

import ddlf


class DigitsCNN(ddlf.IApp):
    """1,797 digits of 8 x 8 pixels; every fifth one is for the test."""

    master_epochs = 12
    worker_epochs = 2
    batch_size = 16
    learning_rate = 0.1

    async def load_dataset(self):
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_digits()

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ],
            name="digits_cnn",
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(DigitsCNN)
