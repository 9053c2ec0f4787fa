"""What fuse replaces, a part in each file: how it is recognised, its fused forward, and its registration at the end.

A new part's file goes among the names below. Their order is that in which a report lists what ran, and in which fuse
tries the parts of a stage; so no file may import one that stands after it.
"""

import importlib

FILES = (
    "head", "norm", "residual_norm", "adapters", "mlp", "relu2", "experts", "rotary", "qk_norm", "shared_prefix",
    "projections",
)  # fmt: skip

for _name in FILES:
    importlib.import_module(f"tigon.fusion.parts.{_name}")
