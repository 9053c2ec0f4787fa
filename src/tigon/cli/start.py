"""What a run prints when it begins: the start line and, after the first step, the report of what Tigon replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from tigon.cli.model import stored_form
from tigon.kernels import why_not_triton

if TYPE_CHECKING:
    from tigon.cli.options import TrainOptions

PRECISION = {
    "bf16": "bf16 autocast over fp32 weights",
    "fp16": "fp16 autocast over fp32 weights",
    "bf16-pure": "bf16 weights",
    "fp32": "fp32",
}


def start_line(
    options: TrainOptions, model: Any, trained: int, precision: str, device: torch.device, readers: int
) -> str:
    """The model, how many of its parameters are trained, on what, by what, and in which steps.

    trained: the number of trained parameters; with LoRA not all. readers: how many different batches a step reads.
    """
    whole = model.num_parameters()
    share = "all trained" if trained == whole else f"{count(trained)} trained"
    words = PRECISION[precision]
    stored = stored_form(model.config)
    if stored:
        cast = "" if precision in ("fp32", "bf16-pure") else f" and {precision} autocast"
        kept = "fp32" if precision == "fp32" else "fp16" if precision == "fp16" else "bf16"
        words = f"{stored} weights, {'products' if stored in ('nf4', 'fp4') else 'the rest'} in {kept}{cast}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    per_step = options.batch_size * options.grad_accum * readers
    factors = [str(options.batch_size), f"{options.grad_accum} micro-batches" if options.grad_accum > 1 else "",
               f"{readers} processes" if readers > 1 else ""]  # fmt: skip
    parts = [f"{per_step} {'requests' if options.task == 'rank' else 'sequences'} a step"]
    if per_step != options.batch_size:
        parts[0] += f" ({' × '.join(f for f in factors if f)})"
    return (
        f"{options.model}: {count(whole)} parameters, {share}; {words} on {where}, "
        f"{backend(options, device)}; learning rate {options.lr:g}, {', '.join(parts)}"
    )


def backend(options: TrainOptions, device: torch.device) -> str:
    """The name of the backend that runs the model's layers."""
    if options.plain:
        return "plain, without Tigon" if options.task != "rank" else "plain, but with shared prefixes"
    reason = why_not_triton(torch.empty(0, dtype=torch.float32, device=device))
    return "fused, Triton kernels" if reason is None else "fused, PyTorch reference"


def count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.2f}B"
    return f"{parameters / 1e6:,.1f}M" if parameters >= 1e6 else f"{parameters / 1e3:,.1f}k"


def told(report: Any) -> str:
    """A report for the screen. With several models: the first model's report in full, and a line for each other."""
    models = getattr(report, "models", None)
    if not models:
        return str(report)
    (first, whole), *others = models.items()
    lines = [report.headline()]
    lines += [f"  {row.kind:<8} {'fused' if row.fused else 'left '} {row.what}" for row in report.rows]
    lines += [report.last_step(), f"{first}: {whole}"]
    return "\n".join([*lines, *(f"{role}: {other.headline()}" for role, other in others)])


class FirstStep(TrainerCallback):
    """Prints a fusion's report after the first step, when its counts are a real step's."""

    def __init__(self, console: Any, fusion: Any) -> None:
        self.console, self.fusion = console, fusion

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fusion is not None:
            self.console.print(told(self.fusion.report()), highlight=False, markup=False, soft_wrap=True)
        self.fusion = None
