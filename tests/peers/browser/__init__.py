"""The browser's engine beside Keras."""
