"""A custom layer and a custom function that are registered in Keras."""

import keras
from keras import layers, ops


@keras.saving.register_keras_serializable("zoo")
class Scaled(layers.Layer):
    """A layer that multiplies its input by learned weights, and adds a constant."""

    def __init__(self, by=1.0, more=None, **kwargs):
        super().__init__(**kwargs)
        self.by, self.more = by, more or {}

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="factor")

    def call(self, x):
        return x * self.factor + self.by

    def get_config(self):
        return super().get_config() | {"by": self.by, "more": self.more}


@keras.saving.register_keras_serializable("zoo")
def swish(x):
    return x * ops.sigmoid(x)
