"""Published models: downloaded by name, read as our models, and written for other programs.

There is one file per family, which maps its config and its tensors. `load` also loads runs of
ours; what is measured on models belongs to `analyses`.
"""
