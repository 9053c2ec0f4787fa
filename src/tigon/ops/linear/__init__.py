"""Products with weights: gated MLPs, projections, LoRA and other adapters, with hand-written forward and backward."""
