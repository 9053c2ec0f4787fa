"""The parts that fuse knows, one file each: recognition, fused forward, and registration at the end.

A new part's file goes among the names below. fuse tries a stage's parts, and a report lists the parts that ran, in this
order. So no file may import a later file.
"""

import importlib

FILES = (
    "head", "norm", "residual_norm", "adapters", "mlp", "activation", "relu_layers", "xielu", "experts",
    "expert_adapters", "dense_experts", "rotary", "qk_norm", "conv", "recurrence", "shared_prefix", "projections",
    "fp8_checkpoint", "fp8", "patches", "images", "documents", "decoder_layer",
)  # fmt: skip

for _name in FILES:
    importlib.import_module(f"tigon.fusion.parts.{_name}")
