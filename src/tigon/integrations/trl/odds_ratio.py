"""ORPO: the trainer reads whole logits for loss and metrics; tigon.losses.orpo gives both without them."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from tigon.fusion.logits.split import is_split
from tigon.integrations.trl.swap import Side, Swaps
from tigon.losses.head.head import Head
from tigon.losses.linear_logprob import linear_logprob
from tigon.losses.preference import ORPO, orpo

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/rejected", "logps/chosen",
    "nll_loss", "log_odds_ratio", "log_odds_chosen",
)  # fmt: skip


def replace_odds_ratio(trainer: Any, swaps: Swaps) -> None:
    own = trainer.get_batch_loss_metrics
    if trainer.is_encoder_decoder:
        swaps.record_kept("policy", "an encoder-decoder, which keeps prompts and completions apart")
        return

    def get_batch_loss_metrics(
        self: Any, model: Any, batch: Any, train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        if not swaps.active:
            return own(model, batch, train_eval)
        pairs = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
        ids, attention = pairs["concatenated_input_ids"], pairs["concatenated_attention_mask"]
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        with swaps.lazily():
            outputs = model(ids, attention_mask=attention, use_cache=False, **router)
        side = Side.from_logits(outputs.logits)
        if side is None:
            swaps.left["the logits are built: the head is not fused, or FSDP2 frees it"] += 1
            return own(model, batch, train_eval)
        side = side._replace(x=side.x[:, :-1])
        # The odds ratio counts completion tokens; the likelihood counts prompt and completion tokens.
        target = torch.where(attention == 1, ids, -100)[:, 1:]
        with side.as_in_its_forward():
            side = side.in_one_dtype()
            loss, found = orpo(
                side.x, side.head, target, pairs["concatenated_labels"][:, 1:] != -100, config=ORPO(beta=self.beta)
            )  # fmt: skip
            chosen, rejected = (_mean_logit(side._replace(x=x)) for x in side.x.detach().chunk(2))
        swaps.count("orpo", "policy")
        metrics = {name: found[name] for name in METRICS}
        metrics.update({"logits/chosen": chosen, "logits/rejected": rejected})
        prefix = "eval_" if train_eval == "eval" else ""
        logged = {f"{prefix}{k}": self.accelerator.gather_for_metrics(v).mean().item() for k, v in metrics.items()}
        if self.aux_loss_enabled:
            loss = loss + self.aux_loss_coef * outputs.aux_loss
        return loss, logged

    swaps.put(trainer, "get_batch_loss_metrics", types.MethodType(get_batch_loss_metrics, trainer))
    swaps.record_replaced("policy", "the loss and its metrics by tigon.losses.orpo")


@torch.no_grad()
def _mean_logit(side: Side) -> Tensor:
    """Mean over all logits in all rows, including padding, as logged by TRL."""
    x, head = side.as_hidden
    assert isinstance(head, Head)  # made by the trainer's part
    if head.softcap is None and not is_split(head.weight):  # linear: the mean row times the mean column
        bias = 0.0 if head.bias is None else head.bias.float().mean()
        mean = x.float().mean(dim=(0, 1)) @ head.weight.mean(0, dtype=torch.float32)
        return head.scale * (mean + bias)
    target = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    return linear_logprob(x, head, target).mean_logit.mean()
