"""A model's head and the chunked logits walk, shared by all losses without logits."""
