"""Products with weights: gated MLPs, projections, LoRA and other adapters, forward and backward by hand."""
