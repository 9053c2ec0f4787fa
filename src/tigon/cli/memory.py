"""A training step's memory for `tigon inspect`, plain and fused, and whether a GPU has enough."""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tigon.cli.options import option
from tigon.cli.problem import Problem

if TYPE_CHECKING:
    from tigon.cli.adapters import Adapters
    from tigon.cli.model import Source
    from tigon.fusion.memory.estimate import StepMemory

GIB = 2**30
OPTIMIZERS = ("adamw", "adamw-fp32", "adamw-8bit", "sgd-momentum", "sgd")  # tigon.fusion.memory.estimate's
QUANTIZE = ("nf4", "fp4", "int8")
FOUR_BITS = ("nf4", "fp4")  # in these, stacked experts are in 4 bits too
RECOMPUTE = ("auto", "none", "product", "cheap", "mlp")  # tigon.fusion.memory.recompute's
PRECISIONS = ("bf16", "bf16-pure", "fp16", "fp32")
# GiB that the drivers report, by the vendors' card names, in the order in which messages list them.
GPUS = {
    "a10": 22.0, "a100 40gb": 39.4, "a100 80gb": 79.2, "b200": 178.0, "gh200 96gb": 94.5, "h100 80gb": 79.1,
    "h100 nvl": 93.1, "h200": 139.8, "l4": 22.0, "l40s": 44.4, "mi210": 63.9, "mi250x": 63.9, "mi300x": 191.5,
    "mi325x": 255.5, "mi355x": 287.5, "rtx 3090": 23.5, "rtx 4090": 23.5, "rtx 5090": 31.3, "rtx a6000": 47.4,
    "t4": 14.6, "v100 16gb": 15.8, "v100 32gb": 31.7,
}  # fmt: skip
# The CUDA context, the loaded kernels and NCCL's buffers, which no tensor accounts for.
CONTEXT = 1.0 * GIB
# Above this share of the remaining memory, suitable blocks run out before bytes do.
TIGHT = 0.95


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A training step: options of `tigon inspect`."""

    batch_size: int = option(1, "Sequences per GPU in one step.", "--batch-size", "--batch", min=1)
    seq_len: int | None = option(
        None,
        "Tokens per sequence; default: 2048, or fewer if the model has fewer positions.",
        "--seq-len",
        "--seq",
        min=2,
    )
    precision: str = option("bf16", f"{', '.join(PRECISIONS)}; bf16 and fp16 are autocast.")
    optimizer: str = option("adamw", f"{', '.join(OPTIMIZERS)}.")
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass.", "--gradient-checkpointing", "--checkpointing"
    )
    recompute: str = option("auto", f"{', '.join(RECOMPUTE)}: activations that the fused model recomputes.")
    offload: bool = option(False, "Fused model: offload saved activations to host memory.")
    fp8: bool = option(False, "Fused model: run the decoder layers' linear layers in FP8.")
    lora: int | None = option(None, "Rank of LoRA adapters.", min=1)
    lora_targets: str = option("all-linear", "Layers with adapters, separated by commas.")
    lora_dropout: float = option(0.0, "Dropout before the adapters.", min=0, max=0.999)
    quantize: str | None = option(
        None, f"{', '.join(QUANTIZE)}: 4-bit or 8-bit frozen linear layers under adapters, and 4-bit experts."
    )
    attention: str | None = option(None, "sdpa, eager, flash_attention_2, …")
    gpus: int = option(1, "GPUs to shard weights, gradients and optimizer states over.", min=1)

    def words(self, adapters: Adapters | None = None) -> str:
        """Describe the step. adapters: saved adapters, in place of --lora."""
        weights = {"bf16": "fp32 weights under bf16 autocast", "fp16": "fp32 weights under fp16 autocast",
                   "bf16-pure": "bf16 weights", "fp32": "fp32 weights"}[self.precision]  # fmt: skip
        if self.quantize:
            weights = f"frozen weights in {self.quantize}"
            weights += "" if self.precision in ("bf16-pure", "fp32") else f" under {self.precision} autocast"
        parts = [f"{self.batch_size} × {self.seq_len:,} tokens", weights, self.optimizer]
        if self.gradient_checkpointing:
            parts.append("gradient checkpointing")
        if adapters or self.lora:
            parts.append(str(adapters or f"LoRA of rank {self.lora}"))
        if self.gpus > 1:
            parts.append(f"sharded over {self.gpus} GPUs")
        return ", ".join(parts)


class Sides:
    """A model on the meta device, and a step's memory: plain first, then fused. adapters: saved, in place of --lora."""

    def __init__(self, source: Source, setup: StepOptions, adapters: Adapters | None = None) -> None:
        import torch

        from tigon.cli.adapters import add_adapters, new_adapters
        from tigon.cli.model import random_model
        from tigon.fusion.memory.checkpointing import checkpoint_activations

        self.setup, self.words = setup, setup.words(adapters)
        weights = torch.bfloat16 if setup.precision == "bf16-pure" or setup.gpus > 1 else torch.float32
        if setup.precision == "fp32":
            weights = torch.float32
        if setup.quantize:
            half = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}
            weights = half.get(setup.precision, torch.float32)  # for weights that stay whole
        options = {"attn_implementation": setup.attention} if setup.attention else {}
        with torch.device("meta"):
            self.model = random_model(copy.deepcopy(source.config), any_head=True, dtype=weights, **options).train()
        self.model.config.use_cache = False
        self.model.config.get_text_config().use_cache = False
        self.whole = self.model.num_parameters()
        # The layers stay whole on the meta device, with the difference in bytes kept beside them.
        narrow = _linear_layers(self.model) if setup.quantize else []
        self.saved = sum(m.weight.nbytes - stored_bytes(m, setup.quantize) for m in narrow)
        self.dense = max((m.weight.nbytes for m in narrow), default=0)
        if setup.quantize in FOUR_BITS:
            self._count_experts(choose_format(source.config))
        if setup.lora:
            adapters = new_adapters(setup.lora, setup.lora_targets, setup.lora_dropout)
        if adapters is not None:
            self.model = add_adapters(self.model, adapters)
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        if setup.gradient_checkpointing:
            checkpoint_activations(self.model)
        self.fusion: Any = None

    def _count_experts(self, format: Any) -> None:
        """Count stacked experts as `tigon.quantize_experts` stores them."""
        from tigon.fusion.quantized_experts import find_stacks
        from tigon.ops.experts.quantized import count_bytes
        from tigon.ops.experts.quantized_products import WORKSPACE

        for stack in find_stacks(self.model):
            self.saved += stack.nbytes - count_bytes(tuple(stack.shape), format)
            self.dense = max(self.dense, min(stack.nbytes, WORKSPACE))

    def memory(self) -> StepMemory:
        """The memory for a step with the current model. Raises tigon.fusion.memory.estimate.CannotEstimate."""
        import torch

        from tigon.fusion.memory.estimate import step_memory

        setup = self.setup
        ids = torch.zeros(setup.batch_size, setup.seq_len or 2048, dtype=torch.long, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision)
        sharded = setup.gpus > 1
        found = step_memory(
            self.model, inputs, optimizer=setup.optimizer, shards=setup.gpus,
            autocast=None if sharded else half, stored=torch.float32 if sharded and half else None,
        )  # fmt: skip
        return found if not setup.quantize else self._subtract_quantized(found)

    def _subtract_quantized(self, found: StepMemory) -> StepMemory:
        """The memory with quantised weights, the largest of which is dequantised during the product."""

        def moment(there: Any, dense: int) -> Any:
            parts = {**there.parts, "weights": there.parts["weights"] - self.saved}
            parts["temporary"] += dense
            return dataclasses.replace(there, parts=parts)

        peak = moment(found.peak, self.dense if found.peak.during in ("forward", "backward") else 0)
        return dataclasses.replace(found, peak=peak, kept=moment(found.kept, 0), update=moment(found.update, 0))

    def fuse(self) -> Any:
        from tigon import fuse

        level: Any = self.setup.recompute  # the command has validated the value
        self.fusion = fuse(self.model, recompute=level, offload=self.setup.offload, fp8=self.setup.fp8)
        return self.fusion


def choose_format(config: Any) -> str:
    """The 4-bit format of stacked experts: the checkpoint's mxfp4, or nf4."""
    from tigon.cli.model import stored_form

    return "mxfp4" if stored_form(config) == "mxfp4" else "nf4"


def _linear_layers(model: Any) -> list[Any]:
    """The layers whose weights --quantize stores in 4 or 8 bits: all linear layers except the head."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]


def stored_bytes(layer: Any, word: str | None) -> int:
    """A linear layer's weight bytes as --quantize stores it."""
    numbers: int = layer.weight.numel()
    if word != "int8":
        return four_bit_bytes(numbers)
    rows = layer.nf if hasattr(layer, "nf") else layer.out_features
    return numbers + 4 * int(rows)  # codes, and a maximum per output


def four_bit_bytes(numbers: int) -> int:
    """A weight's bytes in nf4 or fp4: codes, a byte per 64 weights, a scale per 256 of these bytes, and tables."""
    maxima = -(-numbers // 64)
    tables = 4 * (16 + 256 + 1)  # for the codes and the maxima, and their mean
    return -(-numbers // 2) + maxima + 4 * -(-maxima // 256) + tables


def find_capacity(text: str | None) -> tuple[str, float] | None:
    """The name and bytes of the GPU in --gpu, by name or in GiB; by default this machine's first GPU.

    Raises: Problem for a name that matches none of GPUS, or several.
    """
    if text is None:
        import torch

        if not torch.cuda.is_available():
            return None
        device = torch.cuda.get_device_properties(0)
        return device.name, float(device.total_memory)
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gib|gb)?\s*", text, re.IGNORECASE)
    if number:
        return f"a GPU with {float(number[1]):g} GiB", float(number[1]) * GIB
    wanted = _plain(text)
    found = [name for name in GPUS if _plain(name) == wanted] or [
        n for n in GPUS if wanted and _plain(n).startswith(wanted)
    ]
    if len(found) != 1:
        among = " or ".join(found) if found else "one of " + ", ".join(GPUS) + ", or memory in GiB"
        raise Problem(f"--gpu must be {among}, got {text}")
    return found[0].upper(), GPUS[found[0]] * GIB


def _plain(name: str) -> str:
    kept = re.sub(r"[^a-z0-9]", "", name.lower())
    return kept.removeprefix("nvidia").removeprefix("geforce").removeprefix("amd").removeprefix("instinct")


def verdict(peak: float, capacity: float) -> str:
    """Whether a step fits: "fits", "tight" or "does not fit"."""
    room = capacity - CONTEXT
    return "does not fit" if peak > room else "tight" if peak > TIGHT * room else "fits"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
