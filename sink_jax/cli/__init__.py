"""The commands: their options, their errors in one line, and the drivers that call the rooms.

A command NAME is a module of that name with a dataclass `Options` and a function `main`. `entry`
starts it by its name, `parser` makes the options from the command line, and `command` says errors
in one line; modules elsewhere that are run as `python -m sink_jax.NAME` are one line that calls
`entry`. Nothing imports this room.
"""
