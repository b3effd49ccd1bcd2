"""Transformers in Flax Linen, and computations with their parameters.

Only this folder imports flax; a `Run` is a model with its parameters. Training, data and
files do not belong here.
"""
