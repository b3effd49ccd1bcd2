"""The threshold of a sink, apart from the metrics, so that options have it without JAX."""

EPSILON = 0.3  # the paper's threshold of a sink
