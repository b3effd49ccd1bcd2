"""Files, paths, processes and the terminal: what every room needs of the machine.

Nothing here knows of models or experiments, and only the compile cache imports jax. Code that only
one room uses belongs to that room.
"""
