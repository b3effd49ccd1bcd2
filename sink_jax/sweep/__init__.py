"""Tables of trials: which there are, what they cost, running them, and how far they are."""
