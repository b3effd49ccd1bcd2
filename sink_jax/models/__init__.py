"""Transformers in Flax Linen, and what can be computed from them with their parameters.

This is the only room that imports flax; a `Run` is a model with its parameters. Training, data and
files do not belong here.
"""
