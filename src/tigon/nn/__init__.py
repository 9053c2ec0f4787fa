"""Modules for the operators and losses. Arguments shared with a torch.nn module of the same name mean the same.

Parameters are initialised like the counterpart's. There are no modules for `rope`, `qk_norm_rope`, `add_rms_norm` and
`gated_linear`: a model calls those with its own modules' parameters.
"""

from tigon.nn.layers import (
    GEGLU,
    DyT,
    Embedding,
    GroupNorm,
    LayerNorm,
    PolyNorm,
    ReGLU,
    ReLU2,
    RMSNorm,
    Softmax,
    Sparsemax,
    SwiGLU,
)
from tigon.nn.losses import (
    CPOLoss,
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KLDivLoss,
    KTOLoss,
    LinearCrossEntropyLoss,
    ORPOLoss,
    RLOOLoss,
    SimPOLoss,
    TopKDistillationLoss,
    TVDLoss,
)

__all__ = [
    "GEGLU",
    "CPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "DyT",
    "Embedding",
    "GRPOLoss",
    "GroupNorm",
    "JSDLoss",
    "KLDivLoss",
    "KTOLoss",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "ORPOLoss",
    "PolyNorm",
    "RLOOLoss",
    "RMSNorm",
    "ReGLU",
    "ReLU2",
    "SimPOLoss",
    "Softmax",
    "Sparsemax",
    "SwiGLU",
    "TVDLoss",
    "TopKDistillationLoss",
]
