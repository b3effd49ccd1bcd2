"""Sink metrics of attention maps, the probe of a model, and pictures of both.

The metrics need NumPy, JAX and jaxtyping alone. How a model was trained or loaded does not matter
here.
"""
