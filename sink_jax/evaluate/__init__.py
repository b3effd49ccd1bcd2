"""Sink metrics of attention maps, the probe of a model, and pictures of both.

The metrics need NumPy and JAX alone. How a model was trained or loaded does not matter here.
"""
