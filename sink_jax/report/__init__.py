"""Finished runs as records, and reports that lay them side by side.

`records.RunRecord` is what a run says of itself; `comparison` sets those on the same data side by
side. Nothing here knows the paper: its numbers and claims stand in `paper`.
Nothing here trains, and models are loaded for the attention maps of a comparison alone.
"""
