"""Objects that stand for the logits between the head and the loss, so that the logits are never built."""
