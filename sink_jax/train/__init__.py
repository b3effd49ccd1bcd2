"""A training run: its experiment, its sharded step, its loop, and the folder that it leaves.

`Experiment` is the typed config, `step` the compiled program, `loop` the order of events. Several
runs, and what is read from finished ones, belong to `sweep` and `report`.
"""
