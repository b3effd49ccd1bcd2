"""Time and memory of attention, importance, the loss and a training step, beside others'."""
