"""Hostile input for everything that reads a file or a string: see `python -m tests.fuzz --help`."""
