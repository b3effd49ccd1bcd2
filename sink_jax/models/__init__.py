"""Transformers in Flax Linen, which only this folder imports, and what is done with them."""
