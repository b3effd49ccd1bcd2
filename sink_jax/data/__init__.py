"""Documents, tokenizers, packed caches, synthetic tasks, and the batches a run trains on.

A corpus is a value that names documents; `prepare` tokenizes and packs it once. Nothing here knows
of models or of training.
"""
