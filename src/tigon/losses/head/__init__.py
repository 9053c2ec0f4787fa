"""The head of a model and the walk over chunks of its logits, which every loss without logits shares."""
