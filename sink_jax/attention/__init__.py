"""Attention variants as values: their components, the spec that joins them, the definition.

A new variant is one class in one of these files, with its formula, its source and its parameters.
Nothing here is fast: kernels compute the same with less memory, and models own the parameters.
"""
