"""Every table, figure and claim of the paper beside our runs."""
