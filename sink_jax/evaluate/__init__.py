"""Sink metrics of attention maps, the probe of a model, and pictures of both.

The metrics need only NumPy and JAX. How a model was trained or loaded does not matter here.
"""

EPSILON = 0.3  # the paper's threshold of a sink; declared here, so that options have it without JAX
