"""The commands: their options, their errors in one line, and the drivers that call the rooms.

`entry` starts each by its name; modules elsewhere that are run as `python -m sink_jax.NAME` are
one line that calls it. Nothing imports this room.
"""
