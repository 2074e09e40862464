"""Train on pictures that need not fit into memory: partition files, read as a stream.

    python apps/big_images.py --make 200 pictures       # writes 200 MB of pictures of ten kinds, with their labels
    ddlf data split pictures big_images --file-bytes 16MB
    ddlf run apps/big_images.py --local 2 --data-memory 64MiB
    BIG_IMAGES=s3://bucket/big_images ddlf run apps/big_images.py --config cluster.yaml

The data set is at $BIG_IMAGES, a folder or a URL that all machines can reach; without it, the folder ``big_images`` beside this file.
"""

import os
import sys
from pathlib import Path

import ddlf
import ddlf.data

PIXELS = 128
"""Width and height of the pictures that are made."""
KINDS = 10


class BigImages(ddlf.IApp):
    """A small CNN on pictures of any size."""

    location = os.environ.get("BIG_IMAGES", str(Path(__file__).resolve().with_name("big_images")))
    master_epochs = 2
    batch_size = 32
    learning_rate = 0.002

    async def load_dataset(self):
        self.train_data = ddlf.data.open(self.location)

    async def create_model(self):
        import keras
        from keras import layers

        shape = self.train_data.columns["x"].shape
        self.model = keras.Sequential(
            [
                keras.Input(shape, dtype="uint8"),
                layers.Rescaling(1 / 127.5, offset=-1),
                layers.Conv2D(16, 5, strides=4, activation="relu"),
                layers.Conv2D(32, 3, strides=2, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(KINDS, activation="softmax"),
            ],
            name="big_images",
        )
        self.model.compile(
            keras.optimizers.Adam(self.learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )


def pictures(begin, end):
    """Some of endless pictures: stripes and noise; of each kind the stripes have another angle and another colour.

    Args:
        begin: Number of the first one.
        end: Number behind the last one.

    Returns:
        The pictures, uint8 of shape (n, PIXELS, PIXELS, 3), and the number of each one's kind.
    """
    import numpy as np

    chance = np.random.default_rng([0, begin])
    angles = np.arange(KINDS) * np.pi / KINDS
    across, down = np.meshgrid(np.arange(PIXELS), np.arange(PIXELS))
    waves = np.cos(angles)[:, None, None] * across + np.sin(angles)[:, None, None] * down
    colours = (1 + np.sin(angles[:, None] + np.arange(3) * np.pi / 3)) / 2
    stripes = (60 * (np.sin(waves / 2) + 1)[..., None] * colours[:, None, None]).astype(np.uint8)
    kinds = np.arange(begin, end) % KINDS
    images = chance.integers(0, 128, (end - begin, PIXELS, PIXELS, 3), np.uint8)
    images += stripes[kinds]
    return images, kinds


def make(megabytes, folder):
    """Write pictures into a new folder, as arrays that ``ddlf data split`` reads."""
    import numpy as np

    samples = megabytes * 10**6 // (PIXELS * PIXELS * 3)
    folder.mkdir(parents=True)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (samples, PIXELS, PIXELS, 3))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int64, (samples,))
    for begin in range(0, samples, 512):
        end = min(begin + 512, samples)
        x[begin:end], y[begin:end] = pictures(begin, end)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        ddlf.main(BigImages)
