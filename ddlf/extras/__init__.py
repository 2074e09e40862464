"""Parts that the core does not need: models as text, the adviser, export, stabilisers."""
