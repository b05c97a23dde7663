"""Training of the draft model on what the target generates."""
