"""Finished runs as records, and reports that lay them side by side.

Nothing here knows the paper: its numbers and claims stand in `paper`. Nothing here trains or
loads a model but for the attention maps of a comparison.
"""
