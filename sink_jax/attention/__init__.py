"""Attention variants as values: the slots, the spec that joins them, the definition."""
