"""Transformers in Flax Linen, which only this folder imports, and computations with their parameters."""
