"""Fused training of any Hugging Face model, and the shapes of real ones."""
