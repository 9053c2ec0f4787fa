"""The parts of fuse, one in each file: recognition, fused forward, and registration at the end.

The file of a new part goes among the names below, in whose order fuse tries the parts of a stage and a report lists the
parts that ran. So no file may import a file after it.
"""

import importlib

FILES = (
    "head", "norm", "residual_norm", "adapters", "mlp", "relu2", "experts", "rotary", "qk_norm", "shared_prefix",
    "projections",
)  # fmt: skip

for _name in FILES:
    importlib.import_module(f"tigon.fusion.parts.{_name}")
