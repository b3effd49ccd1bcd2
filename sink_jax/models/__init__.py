"""The language models, in Flax Linen; Linen is used nowhere else."""
