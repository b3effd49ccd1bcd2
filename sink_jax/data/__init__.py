"""Documents, tokenizers, packed rows, synthetic tasks, and the batches a run trains on.

A corpus is a value that names documents (sources, stdlib, chat). `build` tokenizes them and packs
the rows of its shards, `packed` reads rows in place, and `dataset` makes batches of them, with the
edits of token_edits. Nothing here knows of models or of training.
"""
