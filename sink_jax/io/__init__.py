"""Files, hashes, locks, paths, progress: what every room needs of the machine.

Nothing here knows of models, attention or experiments, and nothing here but the compile cache
imports jax. What only one room uses belongs to that room.
"""
