"""Pre-training: one readable loop, and the typed experiment that it runs."""
