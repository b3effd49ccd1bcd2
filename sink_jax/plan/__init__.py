"""Memory, estimated time and cost of a run on TPUs, before any are rented.

`job` compiles training, validation and the probe for the slice and reads how many bytes a device
needs; `estimate` computes the time of a step from datasheets. Nothing here runs on a device.
"""
