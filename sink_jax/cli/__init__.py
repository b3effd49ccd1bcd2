"""The commands: their options, their errors in one line, and what they do with the rooms.

A command NAME is a module of that name with a dataclass `Options` and a function `main`. `entry`
starts it by its name, `parser` makes the options from the command line, and `command` says errors
in one line and ends the process; `one_model` and `results` are what several have in common. Modules
elsewhere that are run as `python -m sink_jax.NAME` are one line that calls `entry`. Nothing imports
this room.
"""
