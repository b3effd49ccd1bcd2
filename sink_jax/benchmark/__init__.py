"""Time, memory and errors of kernels and training steps on this machine, beside baselines.

Every table prints a floor, the time of the same FLOPs in large matrix products, and how far each
row is from it. Tests assert no time, and nothing outside this room imports it but the commands.
"""
