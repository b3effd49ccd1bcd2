"""Many trials: of a config file, at a budget, for several seeds, on one machine or many.

A trial is a training run with its own folder and config. `train` does a single run; this room
decides which trials run, where and in which order.
"""
