"""Models that span workers: each worker has a part of the model and its optimizer."""
