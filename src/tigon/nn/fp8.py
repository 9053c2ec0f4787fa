"""Linear layers in FP8 as modules, with the parameters of their torch counterparts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.fp8.functions import multiply_by
from tigon.ops.fp8.products import why_unsupported
from tigon.ops.fp8.store import JointWeight


class FP8Linear(torch.nn.Linear):
    """`tigon.fp8.linear` with learned parameters, in place of `torch.nn.Linear`; plain F.linear where the device has no
    FP8 products (`tigon.fp8.is_supported`).

    Both sizes are multiples of 16. With FP8 products x is bf16; under autocast to bf16 any float dtype. The parameters
    and the state_dict are torch's: nothing of FP8 is saved. The weight is quantised at each use.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if in_features % 16 or out_features % 16:
            raise ValueError(f"FP8Linear: sizes must be multiples of 16, got {in_features} and {out_features}.")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        # The module may be wrapped by FSDP2, which fills parameters without giving them a new version.
        self.copies = JointWeight("auto", is_versioned=False)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear) -> FP8Linear:
        """The layer with a linear layer's own parameters: no copies."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if why_unsupported(x.device):
            return F.linear(x, self.weight, self.bias)
        return multiply_by(self.copies, "FP8Linear", x, [self.weight], [self.bias])[0]
