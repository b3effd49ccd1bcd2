"""Documents, tokenizers, packed chunks, synthetic tasks, and the batches made of them."""
