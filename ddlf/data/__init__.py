"""Data: sets that are ready, trees of arrays, and what an app has of them."""
