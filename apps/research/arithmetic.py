"""A small transformer with an own layer and an own train_step that learns to add.

``arithmetic_keras.py`` is plain Keras, ``arithmetic.py`` the same on workers: compare them.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ddlf

EPOCHS = 3
BATCH_SIZE = 64
WORDS = " 0123456789+="
LENGTH = 10


def load():
    """Return sums such as ``12+7=19`` as numbers of characters. The model predicts each character from the previous ones.

    Every tenth sum is for validation.
    """
    random = np.random.default_rng(0)
    texts = [f"{a}+{b}={a + b}".ljust(LENGTH + 1) for a, b in random.integers(0, 100, (1000, 2))]
    words = np.array([[WORDS.index(letter) for letter in text] for text in texts])
    held_out = np.arange(len(words)) % 10 == 0
    x, y = words[:, :-1], words[:, 1:]
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


class Embedding(layers.Layer):
    """The embedding of a character and of its place. It masks blanks at the end."""

    def __init__(self, width):
        super().__init__()
        self.supports_masking = True
        self.word, self.position = layers.Embedding(len(WORDS), width), layers.Embedding(LENGTH, width)

    def compute_mask(self, x, mask=None):
        return keras.ops.not_equal(x, 0)

    def call(self, x):
        return self.word(x) + self.position(keras.ops.arange(LENGTH))


class Transformer(keras.Model):
    """Trains with gradients of at most length 1."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(x)[0])
            else:
                metric.update_state(y, y_pred)
        return self.get_metrics_result()


def build():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Embedding(32)(inputs)
    attended = layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="gelu")(x)))
    model = Transformer(inputs, layers.Dense(len(WORDS))(x), name="arithmetic")
    model.compile(
        keras.optimizers.AdamW(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def slower(epoch, rate):
    return rate if epoch < 1 else rate * 0.5


class Arithmetic(ddlf.IApp):
    master_epochs, batch_size = EPOCHS, BATCH_SIZE

    def load_dataset(self):
        self.x_train, self.y_train, self.x_val, self.y_val = load()

    def create_model(self):
        self.model = build()
        self.callbacks = [keras.callbacks.LearningRateScheduler(slower)]


if __name__ == "__main__":
    ddlf.main(Arithmetic)
