"""A training run: its experiment, its sharded step, its loop, and the folder that it leaves.

`Experiment` is the typed config, `step` the compiled program, `loop` the order of events. `sweep`
trains several runs, and `report` reads finished ones.
"""
