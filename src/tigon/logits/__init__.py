"""Logits that are not built: objects that stand for them between the head and the loss."""
