"""The gradient exchange: one batch in each round."""
