"""The commands: their options, their errors in one line, and what they do with the rooms.

A command has options, in `options` or `model_options`, and a module of its name with `main`, which
takes them. `entry` starts it by its name, `parser` makes the options from the command line, and
`command` says errors in one line and ends the process. The module is imported last, with all that
takes seconds to import. `results` is what several have in common. Modules elsewhere that are run as
`python -m sink_jax.NAME` are one line that calls `entry`. Nothing imports this room.
"""
