"""Sink metrics, the probe and its pictures."""
