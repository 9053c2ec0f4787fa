"""How a model is fused: analyse a forward, prove a replacement by numbers, patch the instance, report."""
