"""Many trials: of a config file, at a budget, for several seeds, on one machine or many.

A trial is a training run in a folder of its own, with a config of its own. What a single run does
belongs to `train`; this room decides which trials run, where and in which order.
"""
