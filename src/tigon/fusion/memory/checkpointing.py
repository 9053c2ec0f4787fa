"""Activation checkpointing for a transformers model, as the commands and the benchmarks switch it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Checkpoint without reentrance, by the argument name in this transformers version."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # before transformers 5.20
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs=options)
