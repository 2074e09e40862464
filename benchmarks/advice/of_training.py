"""Defects of training. The module ``defects`` explains their form."""

from __future__ import annotations

from benchmarks.advice.defects import MISLEADS, of

CNN_RATE = "keras.optimizers.SGD(0.05, momentum=0.9)"
MLP_ADAM, TUMOUR_ADAM = "keras.optimizers.Adam(0.003)", "keras.optimizers.Adam(0.005)"
SETTINGS = "    batch_size = 32\n"
STEPS = "steps = self.master_epochs * len(self.x_train) // (self.slots * self.batch_size)"


TRAINING = (
    of("a learning rate far too high", "digits_mlp", "T01", MLP_ADAM, "keras.optimizers.Adam(1.0)"),
    of("a learning rate far too high", "digits_cnn", "T01", CNN_RATE, "keras.optimizers.SGD(10.0)"),
    of("a learning rate too high", "reviews", "T01", "keras.optimizers.Adam(0.01)", "keras.optimizers.Adam(0.5)"),
    of("a learning rate too high", "digits_cnn", "T01", CNN_RATE, "keras.optimizers.SGD(0.6, momentum=0.9)"),
    of("a learning rate far too low", "digits_mlp", "T01", MLP_ADAM, "keras.optimizers.Adam(1e-7)"),
    of("a learning rate too low", "digits_cnn", "T01", CNN_RATE, "keras.optimizers.SGD(1e-4)"),
    of("a learning rate too low", "friedman", "T01", "RATE = 0.01", "RATE = 1e-5"),
    of("an optimizer at another one's rate", "digits_mlp", "T01", MLP_ADAM, "keras.optimizers.SGD(0.003)"),
    of("an optimizer whose default is too low", "digits_mlp", "T01", MLP_ADAM, '"adadelta"'),
    of("an optimizer whose default is too low", "tumours", "T01", TUMOUR_ADAM, '"adagrad"'),
    of("momentum that never ends", "digits_cnn", "T01", "momentum=0.9)", "momentum=0.999)"),
    of("a batch of all samples", "digits_mlp", "T06", SETTINGS, "    batch_size = 1400\n"),
    of("a batch of all samples", "friedman", "T06", SETTINGS, "    batch_size = 1200\n"),
    of("too few epochs", "digits_mlp", "T14", "master_epochs = 12", "master_epochs = 1"),
    of("a schedule that ends early", "scheduled", "T07", STEPS, "steps = 10"),
    of(
        "weight decay that outweighs the loss",
        "digits_mlp",
        "T10",
        MLP_ADAM,
        "keras.optimizers.AdamW(0.01, weight_decay=5.0)",
    ),
    of("gradients cut to nothing", "digits_cnn", "T08", CNN_RATE, "keras.optimizers.SGD(0.05, clipnorm=1e-4)"),
    of("gradients cut to nothing", "digits_cnn", "T08", CNN_RATE, "keras.optimizers.SGD(0.05, clipvalue=1e-5)"),
    of(
        "float16 without scaling",
        "digits_mlp",
        "T02 T03",
        "        self.model = keras.Sequential(",
        '        keras.config.set_dtype_policy("float16")\n        self.model = keras.Sequential(',
        'metrics=["accuracy"])\n',
        'metrics=["accuracy"])\n        keras.config.set_dtype_policy("float32")\n',
    ),
    of("class weights for missing classes", "rare", "T11", "{0: 1.0, 1: 8.0}", "{1: 1.0, 2: 8.0}"),
    of("reversed class weights", "rare", "T13", "{0: 1.0, 1: 8.0}", "{0: 8.0, 1: 1.0}"),
    of(
        "stops by a metric that is not there",
        "digits_mlp",
        "T09",
        'metrics=["accuracy"])\n',
        'metrics=["accuracy"])\n        self.callbacks = [keras.callbacks.EarlyStopping("val_loss", patience=2)]\n',
        nature=MISLEADS,
    ),
)
