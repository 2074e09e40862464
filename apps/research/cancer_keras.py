"""A table with two inputs, two outputs and weights of samples.

``cancer_keras.py`` is plain Keras, ``cancer.py`` the same on workers: compare them.
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer

EPOCHS = 4
BATCH_SIZE = 16


def load():
    """569 tumours: from means and from errors of ten measures, whether it is benign, and how large the worst ones are."""
    data = load_breast_cancer()
    columns = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    x = {"mean": columns[:, :10], "error": columns[:, 10:20]}
    y = {"benign": data.target[:, None], "worst": columns[:, 20:23]}
    w = np.where(data.target == 0, 2.0, 1.0)  # to miss a malignant one is worse
    held_out = np.arange(len(columns)) % 4 == 0
    parts = [
        keras.tree.map_structure(lambda rows, chosen=chosen: rows[chosen], (x, y, w))
        for chosen in (~held_out, held_out)
    ]
    return parts[0], parts[1]


def build():
    mean, error = keras.Input((10,), name="mean"), keras.Input((10,), name="error")
    x = layers.Concatenate()([layers.Dense(16, activation="relu")(mean), layers.Dense(8, activation="relu")(error)])
    x = layers.Dense(16, activation="relu", kernel_regularizer="l2")(x)
    outputs = {
        "benign": layers.Dense(1, activation="sigmoid", name="benign")(x),
        "worst": layers.Dense(3, name="worst")(x),
    }
    model = keras.Model({"mean": mean, "error": error}, outputs, name="cancer")
    model.compile(
        "adam",
        {"benign": "binary_crossentropy", "worst": "mse"},
        loss_weights={"benign": 1.0, "worst": 0.5},
        metrics={"benign": ["accuracy", keras.metrics.AUC()], "worst": [keras.metrics.R2Score(class_aggregation=None)]},
        weighted_metrics={"benign": [keras.metrics.Recall()], "worst": ["mae"]},
    )
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    (x, y, w), validation = load()
    model = build()
    model.fit(x, y, sample_weight=w, batch_size=BATCH_SIZE, epochs=EPOCHS, validation_data=validation)
