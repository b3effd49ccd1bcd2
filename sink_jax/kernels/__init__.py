"""Implementations of attention that agree with `attention.reference` to rounding."""
