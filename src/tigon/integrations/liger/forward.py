"""The keyword arguments that Liger's forwards of models take. A model's own forward would drop them without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_LOSS = "call LigerForCausalLMLoss, or tigon.linear_cross_entropy, with the model's hidden states and its head's weight"
_ROWS = "tigon.linear_logprob has is_top1 for each token"
# Each argument's default, and how you get the result that the argument asks for.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "lse_square_scale": (0.0, _LOSS),
    "label_smoothing": (0.0, _LOSS),
    "ce_weight": (None, _LOSS),
    "use_token_scaling": (False, _LOSS),
    "accum_dtype": (None, _LOSS),
    "return_token_accuracy": (False, _ROWS),
    "return_predicted_tokens": (False, _ROWS),
}


def check_forward_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what a fused model would not honour.

    Args:
        arguments: the keyword arguments of a call of the model.
    Raises: ValueError for an argument of Liger's forwards that asks for another loss or another result, and for
        skip_logits=True without labels, as Liger does. skip_logits=False is honoured as it is: whoever reads the
        logits finds them.
    """
    for name, (default, instead) in ARGUMENTS.items():
        value = arguments.get(name, default)
        if value is not None and value is not default and (isinstance(value, Tensor) or value != default):
            raise ValueError(
                f"tigon.integrations.liger: the model's forward must not be given {name}={value!r}: the model computes its "
                f"own loss, which has no such option, and would drop it in silence; {instead}."
            )
    if arguments.get("skip_logits") and arguments.get("labels") is None and arguments.get("shift_labels") is None:
        raise ValueError("tigon.integrations.liger: skip_logits is True, but labels and shift_labels are None.")
