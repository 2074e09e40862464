"""The mathematics of training on many workers: split samples, merge updates, step weights, shrink the traffic.

Pure functions and values over NumPy arrays, used by master and workers alike: no network, no thread, no clock and
no Keras.
"""
