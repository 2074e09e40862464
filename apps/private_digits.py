"""Train a small network on digits that stay with peers.

ddlf peers serve apps/private_digits.py --data digits     # the server prints a link, and has test data only
ddlf peers join LINK --data mine.npz                      # a peer, with its own digits of 8 x 8 pixels
python apps/private_digits.py --local 2                   # the same model alone, on the digits that come with DDLF
"""

import ddlf


class PrivateDigits(ddlf.IApp):
    """A network with 2,410 parameters, so that a set of its weights is small."""

    master_epochs = 10
    batch_size = 16
    learning_rate = 0.1

    async def load_dataset(self):
        (x_train, self.y_train), (x_test, self.y_test) = ddlf.load_digits()
        self.x_train, self.x_test = x_train + 0.5, x_test + 0.5  # from 0 to 1, like pictures in a browser

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                layers.Dense(32, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ],
            name="private_digits",
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(PrivateDigits)
