"""Tigon: fused Triton kernels, losses that never build the logits, and `tigon.fuse(model)`.

`__init__.pyi` declares the public names. They are imported on first use, so that `import tigon` costs little more
than `import torch`.
"""

from tigon.lazy import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__)
