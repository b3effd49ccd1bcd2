"""Documents, tokenizers, packed caches, synthetic tasks, and the batches a run trains on.

A corpus is a value that names documents; `prepare` tokenizes and packs it once. Nothing here knows
of models or of training. The way of a text: documents, tokenizer, encoding, packing and
cache_builder write a cache; cache, corpus and token_edits make batches of it; dataset opens all.
Conversations take the same way: chat and chat_template make documents of them, and part_encoding
the weights of their tokens.
"""
