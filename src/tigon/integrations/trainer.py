"""Tigon in the Hugging Face Trainer: a callback, or `tigon.fuse(model)` before the trainer is made.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TigonCallback()])

Both compute the same. The callback also works where the trainer makes the model itself (model_init), reports on the
main process which parts it fused, and can remove the fusion at the end.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import torch

from tigon.fusion.engine.model import Fusion, fuse
from tigon.fusion.engine.report import Report
from tigon.fusion.parts.head import HEAD
from tigon.install import install
from tigon.integrations.packing.padding_free import Packing, PaddingFree, describe_tokens, drop_padding
from tigon.integrations.trl.logprobs import loss_is_left_to_trl

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(f"tigon.integrations.trainer needs transformers: {install('hf')}.") from error

LIGER = (
    "use_liger_kernel=True: Liger-Kernel has replaced parts of the model, and Tigon leaves these alone. Set "
    "use_liger_kernel=False to run the whole model in Tigon."
)
TRL = (
    "this trainer computes its loss from the head's weight, not by the model: the layers run fused, but the loss is "
    "TRL's. Call tigon.integrations.trl.fuse(trainer) in place of this callback to fuse both."
)
WHOLE_LOGITS = "the first step built the logits, which the loss of a fused model avoids"


def _why_whole(args: Any) -> str:
    """Why the Trainer reads logits, if the arguments say so."""
    smoothing = getattr(args, "label_smoothing_factor", 0.0)
    if not smoothing:
        return ""
    return (
        f"label_smoothing_factor={smoothing} withholds the labels from the model, and the Trainer's label smoother "
        "reads all logits. tigon.linear_cross_entropy(…, label_smoothing=…) in your own compute_loss does not"
    )


class TigonCallback(TrainerCallback):
    """Fuses the model when training begins.

    Args:
        remove: restore the model when training ends. Earlier fusions stay.
        report: print the fused parts when training begins, and the parts that ran in the last step when training ends.
        packing: True runs each padded batch as one packed row without padding, with the same loss and gradients. "auto"
            does so where the model's attention needs no dense mask for a packed row, and for batches with at least 5 %
            padding.
        options: for `tigon.fuse` (parts=…, recompute=…).

    `fusion` is the model's `tigon.Fusion` from then on, None before; `report()` is the same as `fusion.report()`. Warns
    when no fused part ran in the first step, and when the first step built logits, which Tigon's loss avoids. With
    packing=True training raises ValueError for a model that mixes the samples in a packed row; with "auto" such a model
    runs with padding. `tokens` counts the "real" tokens so far, those of the "padded" batches, and those "computed".
    """

    def __init__(self, *, remove: bool = False, report: bool = True, packing: Packing = False, **options: Any) -> None:
        if packing not in (True, False, "auto"):
            raise ValueError(f"TigonCallback: packing must be True, False or 'auto', got {packing!r}.")
        self.fusion: Fusion | None = None
        self.tokens: Counter[str] = Counter()
        self._packing: Packing = packing
        self._padding_free: PaddingFree | None = None
        self._padded: Counter[str] = Counter()
        self._remove, self._print, self._options = remove, report, options
        self._ours = self._checked = self._trl = False

    def report(self) -> Report:
        """The fused parts, and how often they ran in the last step. Raises RuntimeError before training has begun."""
        if self.fusion is None:
            raise RuntimeError("TigonCallback.report: nothing is fused before training begins.")
        return self.fusion.report()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if getattr(args, "use_liger_kernel", False):
            warnings.warn(LIGER, stacklevel=2)
        fused_before = any("_tigon_fusion" in vars(module) for module in model.modules())
        self._ours = self._ours if self.fusion is not None and fused_before else not fused_before
        self.fusion = fuse(model, **self._options)
        self._checked = False
        self._trl = loss_is_left_to_trl(model)
        if self._trl:
            warnings.warn(TRL, stacklevel=2)
        self.fusion._ledger.adviser = None  # this callback warns instead
        if self._packing:
            self._pack(model, args)
        if self._print and state.is_world_process_zero:
            print(self.fusion.report())

    def _pack(self, model: Any, args: Any) -> None:
        assert self.fusion is not None  # fused just before
        if self._padding_free is not None:  # training was interrupted, and may begin anew with another model
            self._padding_free.remove()
            self._padding_free = None
        narrow = torch.bfloat16 if args.bf16 else torch.float16
        autocast = functools.partial(torch.autocast, args.device.type, dtype=narrow, enabled=args.bf16 or args.fp16)
        made = drop_padding(self.fusion, model, self._packing, self.tokens, self._padded, autocast)
        if isinstance(made, PaddingFree):
            self._padding_free = made
        elif self._packing is True:
            raise ValueError(f"TigonCallback: packing=True: {made}.")
        else:
            self._padded[made] = 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checked or self.fusion is None:
            return
        self._checked = True
        if getattr(args, "torch_compile", False):
            return  # the ledger does not count calls inside torch.compile
        report = self.fusion.report()
        if not report.calls:
            warnings.warn(
                "no module that tigon.fuse replaced ran in the first step: does the trainer train another model, or a "
                "copy? Print TigonCallback.report() to list the replaced modules.",
                stacklevel=2,
            )
            return
        idle = [row.idle for row in report.fused_rows if row.kind == HEAD.kind and row.idle and not row.calls]
        if idle and not self._trl:
            warnings.warn(f"{WHOLE_LOGITS}: {_why_whole(args) or idle[0]}.", stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.fusion is None:
            return
        if self._print and state.is_world_process_zero:
            print(self.fusion.report().last_step())
            if sentence := describe_tokens(self.tokens):
                print(sentence)
            if self._padded:
                print(f"Run with padding: {'; '.join(self._padded)}.")
        if self._padding_free is not None:
            self._padding_free.remove()
            self._padding_free = None
        if self._remove and self._ours:
            self.fusion.remove()
