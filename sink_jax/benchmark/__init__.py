"""Time, memory and errors of kernels and training steps on this machine, beside baselines.

Every table prints the floor and how far it is from it. Tests assert no time, and nothing outside
this room imports it but the commands.
"""
