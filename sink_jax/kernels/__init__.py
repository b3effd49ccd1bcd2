"""Implementations of the definition in `attention` that never hold a T x T array.

`dispatch` chooses one by device, shape and variant; each states which cases it does not support.
Models and losses do not belong here, and nothing here names a model.
"""
