"""Training steps of hybrids, experts with adapters and models with images: Hugging Face, PEFT, Liger, Unsloth, Tigon.

    python -m studies.models_2026 --output results                            every case, in several minutes on an H200
    python -m studies.models_2026 --output results --only qwen3-next          some of it
    python -m studies.models_2026 --output results --resume FILE              what is missing in a file
    python -m studies.models_2026 --output results --tiny                     small models, for a look on a CPU

Real widths, few layers, random weights, the same on every side. Full training has bf16 weights and SGD, whose states
take no memory. Adapters are as in studies.adapters: a frozen base in bf16 or 4 bits, adapters in fp32, autocast. "hf"
runs the delta rule by flash-linear-attention where that is installed, and its note says so.

`speed` is the median step, tokens/s and the peak of the timed steps. `gradients` compares every trained parameter's
gradient with fp32's by the same numbers, in few layers; of a large gradient 65,536 numbers in equal steps are kept.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["unsloth"]:
    import unsloth  # noqa: F401

import argparse
import importlib.metadata
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import report
from torch import Tensor, nn

from studies.adapters.rows import Row
from studies.adapters.run import PACKAGES, Worker
from studies.adapters.sides import answer, quantize, serve, settle, use_fp32
from tigon.cli.environment import read_package_version
from tigon.presets import preset_config

PEERS = {"liger": "liger", "unsloth": "unsloth"}  # the process of a side, by default "peft": they change classes
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KEPT = 65536  # numbers of a gradient
IMAGE = 28  # patches along each edge of an image, 448 pixels


@dataclass(frozen=True)
class Case:
    """rank: 0 for full training. parameters: the stacks with adapters. images: one for each sequence."""

    model: str
    batch: int
    seq: int
    layers: int
    sides: tuple[str, ...] = ("tigon", "hf", "liger")
    rank: int = 0
    quantized: str = ""
    checkpointing: bool = False
    parameters: tuple[str, ...] = ()
    images: bool = False
    few: int = 2  # layers whose gradients are compared

    def list_rows(self) -> list[Row]:
        """Speed, then the gradients of a few layers, fp32's first."""
        row = Row(
            self.model, "", self.batch, self.seq, self.rank, self.quantized, self.checkpointing, layers=self.layers
        )
        speed = [replace(row, side=side) for side in self.sides]
        if self.quantized:  # the base's rounding would be compared as well
            return speed
        few = replace(row, measure="gradients", batch=1, seq=min(1024, self.seq), layers=self.few)
        return speed + [replace(few, side=side) for side in ("fp32", *(s for s in self.sides if s != "unsloth"))]


WITH_UNSLOTH = ("tigon", "hf", "liger", "unsloth")
# The most important first: a budget that is too small leaves out the last ones. Layers in whole periods of attention.
CASES = (
    Case("qwen3-30b-a3b", 4, 2048, 12, WITH_UNSLOTH, rank=16, checkpointing=True, parameters=tuple(EXPERTS)),
    Case("qwen3-next-80b-a3b", 1, 8192, 8, few=4),
    Case("gpt-oss-20b", 1, 2048, 24, ("tigon", "hf", "unsloth"), rank=16, quantized="mxfp4", checkpointing=True,
         parameters=tuple(EXPERTS)),
    Case("gpt-oss-20b", 1, 2048, 24, ("tigon", "hf"), rank=16, quantized="nf4", checkpointing=True),
    Case("qwen3-vl-4b", 4, 1024, 36, rank=16, images=True),
    Case("deepseek-v3", 2, 2048, 2),
    Case("gemma-4-26b-a4b", 2, 2048, 6, few=6),
    Case("llama-4-scout", 2, 2048, 4, few=4),
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {"deepseek-v3": {"first_k_dense_replace": 1}}
_SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
          "num_key_value_heads": 2}  # fmt: skip
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {**_SMALL, **_FEW},
    "qwen3-next-80b-a3b": {
        **_SMALL, **_FEW, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "gpt-oss-20b": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-vl-4b": {**_SMALL, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    "deepseek-v3": {
        **{k: v for k, v in _SMALL.items() if k != "head_dim"}, "num_key_value_heads": 4, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    "gemma-4-26b-a4b": {
        **_SMALL, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32,
        "vocab_size_per_layer_input": 512,
    },
    "llama-4-scout": {**_SMALL, "intermediate_size_mlp": 96, "num_local_experts": 4},
}  # fmt: skip
_TINY_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the models


def make_config(row: Row, is_tiny: bool) -> Any:
    fields: dict[str, Any] = {"num_hidden_layers": row.layers} | OWN.get(row.model, {})
    config = preset_config(row.model, **(fields | (_TINY[row.model] if is_tiny else {})))
    if is_tiny and hasattr(config, "vision_config"):
        for name, value in _TINY_VISION.items():
            setattr(config.vision_config, name, value)
        config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = (
            504, 505, 506, 507,
        )  # fmt: skip
    config.use_cache = config.get_text_config().use_cache = False
    return config


def build(row: Row, case: Case, device: torch.device, is_tiny: bool) -> tuple[Any, str]:
    """The model of a side, ready to train, and a note."""
    import transformers
    from harness.training import _liger

    from tigon.fusion.memory.checkpointing import checkpoint_activations
    from tigon.presets import auto_class

    config = make_config(row, is_tiny)
    if row.side == "unsloth":
        return build_with_unsloth(row, case, config, device)
    torch.manual_seed(0)
    with device:
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    note = f"transformers {transformers.__version__}, {model.config._attn_implementation} attention"
    if hasattr(config.get_text_config(), "linear_num_value_heads") and row.side != "tigon":
        note += f", {find_delta_rule()}"
    model.train()
    if row.quantized:
        model.requires_grad_(False)
        if row.side == "tigon":
            import tigon

            tigon.quantize_experts(model, format=row.quantized)
        if device.type == "cuda":
            quantize(model, device, "nf4")
    if row.side == "fp32":
        model = use_fp32(model)
    if row.side == "liger":
        _liger(model)
    if row.rank:
        model = add_adapters(model, row, case)
    if row.checkpointing:
        checkpoint_activations(model)
    if row.side == "tigon":
        import tigon

        fusion = tigon.fuse(model, recompute="cheap") if row.rank else tigon.fuse(model)
        return model, str(fusion.report())
    return model, note


def find_delta_rule() -> str:
    try:
        return f"flash-linear-attention {importlib.metadata.version('flash-linear-attention')}"
    except importlib.metadata.PackageNotFoundError:
        return "the delta rule in torch"


def add_adapters(model: nn.Module, row: Row, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    # Adapters of the text model alone: the tower's layers have other names.
    lora = LoraConfig(
        r=row.rank, lora_alpha=2 * row.rank, target_modules=ATTENTION, target_parameters=list(case.parameters) or None,
        lora_dropout=0.0, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = get_peft_model(model, lora)
    if row.checkpointing:
        adapted.enable_input_require_grads()  # as TRL's trainer does with PEFT
    settle(adapted)
    return adapted


def build_with_unsloth(row: Row, case: Case, config: Any, device: torch.device) -> tuple[Any, str]:
    """FastLanguageModel as its notebooks use it, with the adapters' targets of the other sides."""
    from studies.adapters import sides

    sides.PROJECTIONS = ATTENTION + [name.rpartition(".")[2] for name in case.parameters]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 3
    model, said = sides.of_unsloth(replace(row, quantized="nf4" if row.quantized else ""), config, device)
    settle(model)
    return model, said()


def draw_inputs(model: Any, row: Row, case: Case, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    config = model.config
    ids = torch.randint(4, config.get_text_config().vocab_size - 16, (row.batch, row.seq), generator=generator)
    labels = ids.clone()
    labels[:, : row.seq // 8] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if case.images:
        vision = config.vision_config
        side = IMAGE if row.seq > 512 else 4
        tokens = side**2 // vision.spatial_merge_size**2
        ids[:, 1 : tokens + 1], labels[:, : tokens + 2] = config.image_token_id, -100
        ids[:, 0], ids[:, tokens + 1] = config.vision_start_token_id, config.vision_end_token_id
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(row.batch * side**2, width, generator=generator).to(torch.bfloat16)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * row.batch)
        owner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "mm_token_type_ids" in inspect.signature(type(owner).forward).parameters:
            inputs["mm_token_type_ids"] = (ids == config.image_token_id).long()
    return {name: t.to(device) for name, t in inputs.items()}


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(
    row: Row, device: torch.device, *, overrides: dict[str, Any], warm: int, steps: int, references: Path
) -> Row:
    """Fill a row. overrides: {"tiny": bool}. references: the folder with the gradients of the fp32 side."""
    began = time.perf_counter()
    cuda = device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    case = find_case(row)
    model, row.note = build(row, case, device, overrides["tiny"])
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    row.trained = sum(p.numel() for p in own.values())
    row.weights_gib = torch.cuda.memory_allocated() / 2**30 if cuda else None
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(own.values(), lr=1e-4, fused=cuda) if row.rank else torch.optim.SGD(own.values(), lr=1e-4)
    )
    inputs = draw_inputs(model, row, case, device)
    if row.side == "fp32" and "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bool(row.rank) and row.side != "fp32")

    def take_step() -> Tensor:
        with autocast:
            loss: Tensor = model(**inputs).loss
        loss.backward()
        if row.measure == "speed":
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if row.measure == "gradients":
        row.loss = take_step().item()
        compare(row, {n.replace("base_model.model.", ""): sample(p.grad) for n, p in own.items()}, references)
    else:
        for _ in range(warm):
            take_step()
        wait()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            start = time.perf_counter()
            loss = take_step()
            wait()
            row.steps_ms.append(1e3 * (time.perf_counter() - start))
        row.step_ms = statistics.median(row.steps_ms)
        row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
        row.loss = loss.item()
    if cuda:
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        row.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    if not torch.isfinite(torch.tensor(row.loss)):
        row.status, row.reason = "wrong", "the loss is not finite"
    row.wall_s = time.perf_counter() - began
    return row


def sample(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(0)
    flat = gradient.detach().flatten()
    return flat[:: max(1, flat.numel() // KEPT)].float().cpu()


def compare(row: Row, found: dict[str, Tensor], references: Path) -> None:
    """Keep fp32's gradients; hold those of another side to them, relative in the Euclidean norm."""
    path = references / f"{row.model}-{row.rank}.pt"
    if row.side == "fp32":
        torch.save((row.loss, found), path)
        return
    wanted, exact = torch.load(path)
    if exact.keys() != found.keys():
        raise RuntimeError(f"other trained parameters than fp32's: {sorted(exact.keys() ^ found.keys())[:3]}")
    row.loss_error = float(row.loss or 0.0) - wanted
    away = {name: float((found[name] - g).norm()) for name, g in exact.items()}
    size = {name: float(g.norm()) for name, g in exact.items()}
    row.error = (sum(a * a for a in away.values()) / max(sum(s * s for s in size.values()), 1e-30)) ** 0.5
    row.worst = max(away, key=lambda name: away[name] / max(size[name], 1e-30))


def find_case(row: Row) -> Case:
    return next(c for c in CASES if (c.model, c.rank, c.quantized) == (row.model, row.rank, row.quantized))


# -------------------------------------------------------------------------------------------------------------- the run


def plan(options: argparse.Namespace) -> list[Row]:
    words = options.only.split(",") if options.only else [""]
    sides = (*options.sides.split(","), "fp32") if options.sides else None
    rows = [row for case in CASES for row in case.list_rows() if any(word in case.model for word in words)]
    rows = [row for row in rows if sides is None or row.side in sides]
    if options.tiny:
        layers = {"qwen3-next-80b-a3b": 4, "gemma-4-26b-a4b": 6}
        rows = [replace(row, seq=64, layers=layers.get(row.model, 2), batch=min(row.batch, 2)) for row in rows]
    return sorted(rows, key=lambda row: row.measure == "gradients")


def key(row: Row) -> tuple[Any, ...]:
    return (*report.case_key(row.to_dict()), row.layers, row.side)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--only", help="models whose names contain one of these, separated by commas; default: all")
    parser.add_argument("--sides", help="separated by commas; default: those of every case")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further row is begun")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a row is given up")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warm", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--resume", type=Path, help="a result file whose rows are kept, and not measured again")
    parser.add_argument("--logs", type=Path, help="folder for what the processes say; default: none is kept")
    parser.add_argument("--tiny", action="store_true", help="small models, without processes of their own")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    kept = [Row(**row) for row in report.load(options.resume)["rows"]] if options.resume else []
    done = {key(row) for row in kept if row.status == "ok" or row.reason == "out of memory"}
    rows, content = kept, report.result("adapters", kept, device=device)
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        request = {"device": str(device), "overrides": {"tiny": options.tiny}, "references": folder,
                   "warm": options.warm, "steps": options.steps}  # fmt: skip
        try:
            for row in plan(options):
                if key(row) in done and row.side != "fp32":
                    continue
                if time.monotonic() - began > options.budget:
                    print(f"left out, the time was up: {row.model} {row.side} {row.measure}", flush=True)
                    continue
                peer = PEERS.get(row.side, "peft")
                if options.tiny:
                    new = answer({**request, "row": row.to_dict()}, measure)
                else:
                    if peer not in workers or workers[peer].ended:
                        workers[peer] = Worker(peer, logs, Path(folder), "studies.models_2026")
                    reason = workers[peer].await_ready()
                    new = replace(row, status="failed", reason=reason) if reason else (
                        workers[peer].run(row, options.limit, **request)
                    )  # fmt: skip
                rows = [old for old in rows if key(old) != key(new)] + [new]
                content = report.result("adapters", rows, device=device)
                content["environment"]["packages"] |= {
                    name: read_package_version(name) for name in (*PACKAGES, "flash-linear-attention")
                }
                report.save(options.output / (options.name or report.file_name(content, "models-2026")), content)
                speed = f"{new.tokens_per_s:,.0f} tokens/s" if new.tokens_per_s else f"error {new.error}"
                name = f"{new.model} {new.quantized or new.rank} {new.measure} {new.side}"
                found = f"{new.status} {new.reason} {speed}, {new.peak_gib or 0:.2f} GiB"
                print(f"{time.monotonic() - began:6.1f} s  {name}: {found}", flush=True)
        finally:
            for worker in workers.values():
                worker.end()
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    content = run(parse(arguments))
    print(report.to_text(content))
    failed = [row for row in content["rows"] if row["side"] == "tigon" and row["status"] != "ok"]
    for row in failed:
        print(f"{row['model']} {row['measure']}: {row['reason']}")
    return int(bool(failed))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("peft", *PEERS):
        sys.exit(serve(sys.argv[1], Path(sys.argv[2]), measure))
    sys.exit(main())
