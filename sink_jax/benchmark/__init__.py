"""Time and memory of kernels and training steps on this machine, compared with other libraries.

Every table has a floor, the time that the FLOPs or bytes of a row take at the rates of this machine, and
how far the row is from it. No test asserts a time.
"""
