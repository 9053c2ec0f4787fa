"""Modules for the operators and losses. Arguments shared with a torch.nn module of the same name mean the same.

Parameters are initialised like the counterpart's. There are no modules for `rope`, `qk_norm_rope`, `add_rms_norm` and
`gated_linear`: a model calls those with its own modules' parameters.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
