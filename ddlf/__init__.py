"""Train unchanged Keras 3 models on the machines you already have."""
