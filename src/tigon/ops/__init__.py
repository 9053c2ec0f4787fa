"""One file per operator, from promise to silicon: formula, public op, reference, kernels, launches, autograd.

`tigon.ops.NAME` is the module of an operator, `tigon.NAME` its function. Modules are imported on first use.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
