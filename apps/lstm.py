"""Train an LSTM that reads the images of MNIST row by row, on all workers (81,674 parameters).

ddlf run apps/lstm.py --local 2
ddlf plan apps/lstm.py --local 2
"""

import ddlf


class LSTM(ddlf.IApp):
    """28 rows of 28 pixels, 128 units, 10 classes, trained by plain gradient descent."""

    master_epochs = 10
    batch_size = 100
    learning_rate = 0.5

    async def load_dataset(self):
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_mnist()
        self.x_train, self.x_test = self.x_train[..., 0], self.x_test[..., 0]

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((28, 28)), layers.LSTM(128), layers.Dense(10, activation="softmax")], name="lstm"
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(LSTM)
