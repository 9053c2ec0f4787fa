"""Tigon's losses behind TRL's own trainers: `tigon.integrations.trl.fuse(trainer)`.

TRL keeps its losses, metrics and options. Tigon replaces only the underlying operators, and only on the trainer's
instances:

    SFT, DPO, KTO, GRPO, RLOO    model(…, fused_lm_head=True) gives per-token log-probabilities: tigon.linear_logprob,
                                 in the policy and in the reference
    Distillation, GKD            the divergence from the teacher: tigon.losses.distill
    ORPO                         the loss and the metrics: tigon.losses.orpo

and all these models' layers run fused (`tigon.fuse`). Where Tigon's operator lacks an option, TRL's own code runs, and
the report says why.

Tigon finds the operators by TRL's code, not by version number: a model's forward that takes `fused_lm_head` and
calls an autograd function on the head's weight, a method that calls `_chunked_divergence_loss`, a trainer with
`generalized_jsd_loss` or `odds_ratio_loss`. TRL's function around such an operator is cloned, with the operator's name
bound to Tigon's: the backbone, the shift, the gathering of shards, auxiliary losses and metrics remain TRL's.

Source: TRL 1.16, https://github.com/huggingface/trl
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tigon.fusion.engine.model import Fusion
from tigon.fusion.engine.model import fuse as fuse_model
from tigon.fusion.engine.report import Report, Row
from tigon.fusion.parts.head import get_head
from tigon.integrations.packing.padding_free import Packing, PaddingFree, describe_tokens, drop_padding
from tigon.integrations.trl.distillation import DIVERGENCE, replace_divergence, replace_jsd
from tigon.integrations.trl.logprobs import replace_projection, why_whole_logits
from tigon.integrations.trl.odds_ratio import replace_odds_ratio
from tigon.integrations.trl.shared_prefix import REFUSAL, Share, Sharing, keep_groups_together
from tigon.integrations.trl.swap import Swaps, global_names, trls_own

ROLES = {"model": "policy", "ref_model": "reference", "teacher_model": "teacher"}


def fuse(
    trainer: Any, *, losses: bool = True, keep_bytes: int = 0, shared_prefix: Share = False, packing: Packing = False,
    **options: Any,
) -> TrainerFusion:  # fmt: skip
    """Make a TRL trainer's loss run without logits and its models' layers fused, in place and reversibly.

    Args:
        trainer: a TRL trainer, constructed, but not training yet. For a plain `transformers.Trainer` the model is
            fused.
        losses: False keeps TRL's loss.
        keep_bytes: logits kept from the forward to the backward pass; as in `tigon.linear_logprob`.
        shared_prefix: True computes a prompt once for all its completions (GRPO, RLOO) or answers (DPO) in a
            micro-batch, with the same losses and gradients; a GRPO micro-batch then has whole groups. "auto" does so
            where at least a quarter of the tokens are prompt tokens, and the model and the trainer support it.
        packing: True runs each padded micro-batch as one packed row without padding, with the same losses, metrics and
            gradients. "auto" does so where the model's attention needs no dense mask for a packed row, and for
            micro-batches with at least 5 % padding. Rows that TRL packed itself (SFTConfig.packing) run as they are.
        options: for `tigon.fuse`, on each model that the trainer holds (parts=…, recompute=…).
    Returns: a TrainerFusion. `report()` lists the replacements, how often each ran in the last training step, and the
        calls left to TRL with reasons; `remove()` restores everything. Also a context manager. If the trainer is
        already fused, its TrainerFusion is returned unchanged.
    Raises: TypeError if trainer is not a trainer; ValueError with shared_prefix=True or packing=True for a model or
        trainer that does not support it.

        trainer = DPOTrainer(model, args=config, train_dataset=pairs, processing_class=tokenizer)
        fusion = tigon.integrations.trl.fuse(trainer)
        trainer.train()
        print(fusion.report())
    """
    model = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module) or not callable(getattr(trainer, "training_step", None)):
        raise TypeError(f"fuse: trainer must be a TRL or transformers trainer, got {type(trainer).__name__}.")
    present = vars(trainer).get("_tigon_fusion")
    if present is not None:
        return present
    models: dict[str, nn.Module] = {}
    for attribute, role in ROLES.items():
        held = getattr(trainer, attribute, None)
        if isinstance(held, nn.Module) and not any(held is other for other in models.values()):
            models[role] = held
    if shared_prefix not in (True, False, "auto"):
        raise ValueError(f"fuse: shared_prefix must be True, False or 'auto', got {shared_prefix!r}.")
    if packing not in (True, False, "auto"):
        raise ValueError(f"fuse: packing must be True, False or 'auto', got {packing!r}.")
    fusion = TrainerFusion(trainer, models, losses, keep_bytes, options, shared_prefix, packing)
    vars(trainer)["_tigon_fusion"] = fusion
    return fusion


class TrainerFusion:
    """The replacements that `fuse` made in a trainer. `models`: the Fusions for its policy, reference and teacher."""

    def __init__(
        self, trainer: Any, models: dict[str, nn.Module], losses: bool, keep_bytes: int, options: dict[str, Any],
        shared_prefix: Share = False, packing: Packing = False,
    ) -> None:  # fmt: skip
        self.trainer = trainer
        self._padding_free: list[PaddingFree] = []
        self.models: dict[str, Fusion] = {}
        self._swaps = Swaps()
        self._ours: list[Fusion] = []
        # TRL's model forward must be replaced before tigon.fuse wraps the model's forward.
        if losses:
            self._replace_losses(models, keep_bytes)
        try:
            for role, model in models.items():
                fused_before = any("_tigon_fusion" in vars(m) for m in model.modules())
                self.models[role] = self._fuse_role(role, model, options, shared_prefix)
                self._swaps.ledgers[role] = self.models[role]._ledger
                self.models[role]._ledger.adviser = None  # this report says whose loss runs
                if not fused_before:
                    self._ours.append(self.models[role])
            for role, model in models.items() if packing else ():
                self._pack_role(role, model, packing)
        except BaseException:
            self.remove()
            raise
        if self._swaps.sharing:
            keep_groups_together(trainer, self._swaps)
        for name in ("training_step", "prediction_step"):
            self._swaps.put(trainer, name, types.MethodType(self._count_steps(name), trainer))

    def report(self) -> TrainerReport:
        swaps = self._swaps
        tokens = swaps.tokens or getattr(getattr(self.trainer, "data_collator", None), "tokens", swaps.tokens)
        return TrainerReport(
            type(self.trainer).__name__, swaps.active, list(swaps.rows), swaps.steps, dict(swaps.calls),
            dict(swaps.total), dict(swaps.left), {role: fusion.report() for role, fusion in self.models.items()},
            dict(swaps.shared), dict(swaps.unshared), swaps.whole_logits, dict(tokens), dict(swaps.padded),
        )  # fmt: skip

    def remove(self) -> None:
        """Restore the trainer and its models. A second call does nothing.

        A model that was fused before stays fused.
        """
        for padding_free in self._padding_free:
            padding_free.remove()
        for fusion in self._ours:
            fusion.remove()
        self._swaps.restore()
        if vars(self.trainer).get("_tigon_fusion") is self:
            del vars(self.trainer)["_tigon_fusion"]

    def __enter__(self) -> TrainerFusion:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<TrainerFusion of {self.report().headline()}>"

    def _replace_losses(self, models: dict[str, nn.Module], keep_bytes: int) -> None:
        trainer, swaps = self.trainer, self._swaps
        if trls_own(trainer, "generalized_jsd_loss"):
            replace_jsd(trainer, swaps)
        elif trls_own(trainer, "odds_ratio_loss", "get_batch_logps", "concatenated_forward", "get_batch_loss_metrics"):
            replace_odds_ratio(trainer, swaps)
        elif DIVERGENCE in global_names(getattr(type(trainer), "_compute_loss", None)):
            replace_divergence(trainer, swaps)
        else:
            swaps.whole_logits = why_whole_logits(trainer)
            for role, model in models.items():
                replace_projection(trainer, swaps, role, model, keep_bytes)
        if not swaps.rows:
            reason = "the model's own loss, without logits when labels are given"
            if not any(get_head(module) is not None for model in models.values() for module in model.modules()):
                reason = "the trainer's own: the model has no language-model head, whose logits Tigon would avoid"
            elif any(base.__module__.startswith("trl.") for base in type(trainer).__mro__):
                reason = "Tigon's loss could not be inserted: the loss reads whole logits, or is your own"
            swaps.record_kept("policy", reason)

    def _fuse_role(self, role: str, model: nn.Module, options: dict[str, Any], share: Share) -> Fusion:
        """A model's Fusion, which shares prompts where possible; with share=True sharing is required."""
        swaps = self._swaps
        if not share:
            return fuse_model(model, **options)
        reason = "" if role in swaps.projections else "its loss does not use log-probabilities that Tigon computes"
        fusion = None
        if not reason:
            try:
                fusion = fuse_model(model, shared_prefix=True, **options)
            except ValueError as error:
                reason = str(error).removeprefix(REFUSAL)
            else:
                reason = "" if fusion._options.shared_prefix else "the model was already fused, without shared_prefix"
        if reason and share is True:
            raise ValueError(f"fuse: shared_prefix=True for the {role} of {type(self.trainer).__name__}: {reason}")
        if reason:
            swaps.rows.append(Row("prefix", role, 1, False, reason))
            return fusion or fuse_model(model, **options)
        swaps.sharing[role] = Sharing(swaps, role, share)
        swaps.rows.append(Row("prefix", role, 1, True, "prompts computed once for all their completions"))
        assert fusion is not None
        return fusion

    def _pack_role(self, role: str, model: nn.Module, packing: Packing) -> None:
        """Run a model without padding where that is possible; with packing=True that is required."""
        trainer, swaps = self.trainer, self._swaps
        collator = trainer.data_collator if role == "policy" else None
        is_packed = getattr(collator, "padding_free", False) is True
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        reason = ""
        if getattr(parallel, "cp_enabled", False) or getattr(parallel, "sp_enabled", False):
            reason = "context parallelism splits the rows"
        elif role == "policy" and getattr(trainer.args, "packing", False) and not is_packed:
            reason = "TRL's wrapped rows have no padding"
        else:
            how: Packing = True if is_packed else packing
            context = trainer.accelerator.autocast
            made = drop_padding(self.models[role], model, how, swaps.tokens, swaps.padded, context)
            if isinstance(made, PaddingFree):
                self._padding_free.append(made)
                if getattr(collator, "padding_free", None) is False and _takes_packed_batches(trainer):
                    swaps.put(trainer, "get_train_dataloader", self._load_packed(collator))
            else:
                reason = made
        if reason and is_packed and packing is not True:
            warnings.warn(
                f"fuse: {type(trainer).__name__} packs its rows, but {reason}; set packing=False and "
                "padding_free=False in its options.",
                stacklevel=4,
            )
        if reason and packing is True:
            raise ValueError(f"fuse: packing=True for the {role} of {type(trainer).__name__}: {reason}.")
        what = reason or ("TRL's packed rows" if is_packed else "padded batches computed without their padding")
        swaps.rows.append(Row("packing", role, 1, not reason, what))

    def _load_packed(self, collator: Any) -> Callable[..., Any]:
        """SFT: training batches packed before they are on the device. Predictions stay those of padded batches."""
        trainer, swaps, packed = self.trainer, self._swaps, copy.copy(collator)
        own = trainer.get_train_dataloader
        packed.padding_free = True

        def get_train_dataloader() -> Any:
            before = trainer.data_collator
            trainer.data_collator = packed if before is collator and swaps.active else before
            try:
                return own()
            finally:
                trainer.data_collator = before

        return get_train_dataloader

    def _count_steps(self, name: str) -> Callable[..., Any]:
        own, swaps = getattr(self.trainer, name), self._swaps

        def step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            swaps.new_step()
            return own(*args, **kwargs)

        step.__name__ = name
        return step


def _takes_packed_batches(trainer: Any) -> bool:
    """Whether a collator may pack: nothing of the user's reads batches, accelerate does not dispatch them, and there
    is padding at all."""
    names = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")
    readers = (getattr(type(trainer), name) for name in ("compute_loss", "training_step"))
    if any(not reader.__module__.startswith(("trl.", "transformers.")) for reader in readers):
        return False
    is_stream = not hasattr(trainer.train_dataset, "__len__")
    is_single = trainer.args.per_device_train_batch_size == 1
    return not (is_stream or is_single) and all(getattr(trainer, name, None) is None for name in names)


@dataclass(frozen=True)
class TrainerReport:
    """The replacements in a trainer, and how often each ran in the last training step.

    rows: the losses, replaced or left. calls: calls to Tigon's losses in the last step (a forward and backward pass),
        by role and operator; total: in all steps. left: calls that went to TRL's own code, by reason. models: each
        model's `tigon.fuse` report. shared: with shared_prefix, the rows computed in the last step ("rows"), and the
        rows that separate sequences would take ("separate"). unshared: calls that ran as separate sequences, by reason.
        whole_logits: why TRL computes the loss itself, from whole logits; otherwise empty. tokens: with packing, the
        "real" tokens of all steps, those of the "padded" batches, and those "computed". padded: calls that ran with
        their padding, by reason.

    str(report) fits on one screen; to_dict() is JSON.
    """

    trainer: str
    active: bool
    rows: list[Row]
    steps: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    models: dict[str, Report] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    unshared: dict[str, int] = field(default_factory=dict)
    whole_logits: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        models = {role: report.to_dict() for role, report in self.models.items()}
        return {**asdict(self), "rows": [asdict(row) for row in self.rows], "models": models}

    def headline(self) -> str:
        state = "" if self.active else ", removed again"
        if self.whole_logits:
            return f"{self.trainer}: the loss is TRL's own, from whole logits ({self.whole_logits}){state}"
        if not any(row.fused for row in self.rows):
            return f"{self.trainer}: the loss is the trainer's own{state}"
        return f"{self.trainer}: the loss runs in Tigon{state}"

    def last_step(self) -> str:
        """One sentence about the operators that ran."""
        if not self.steps:
            return "No step has run yet."
        ran = ", ".join(f"{name} {count}" for name, count in self.calls.items()) or "none of Tigon's losses"
        text = f"Ran in the last of {self.steps} steps: {ran}."
        if self.left:
            text += " Left to TRL: " + "; ".join(f"{reason} ({n}×)" for reason, n in self.left.items()) + "."
        if self.shared:
            rows, separate = self.shared["rows"], self.shared["separate"]
            text += f" Prompts computed once: {rows:,} rows in place of {separate:,}, {1 - rows / separate:.0%} saved."
        if self.unshared:
            reasons = "; ".join(f"{reason} ({n}×)" for reason, n in self.unshared.items())
            text += f" Prompts computed once per row: {reasons}."
        if sentence := describe_tokens(self.tokens):
            text += f" {sentence}"
        if self.padded:
            text += " Run with padding: " + "; ".join(f"{reason} ({n}×)" for reason, n in self.padded.items()) + "."
        return text

    def __str__(self) -> str:
        lines = [self.headline()]
        for row in self.rows:
            lines.append(f"  {row.kind:<7} {'fused' if row.fused else 'left '} {row.name:<9}  {row.what}")
        lines.append(self.last_step())
        for role, report in self.models.items():
            lines += ["", f"{role}: {report}"]
        return "\n".join(lines)
