"""Time and memory of kernels and training steps on this machine, compared with other libraries.

Every table has a floor, the time that the FLOPs or the bytes of a row take at the rates of this
machine, and the ratio of the measured time to it. No test asserts a time.
"""
