"""One training step with adapters, as each library runs it: how a side's model is made, and what is measured of it.

Everything else is as TRL's SFTTrainer has it: frozen weights in bf16, or in nf4 with double quantisation; adapters in
fp32 on all seven projections; autocast to bf16; AdamW; random weights, the same on every side, and adapters whose B is
not zero, so that every gradient is.

    python -m studies.adapters.sides PEER READY      a worker of studies.adapters.run: a request a line, until the end

Liger and Unsloth change classes for good, so that each has a worker of its own. PEER "unsloth" is imported before
torch and transformers, which it patches.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["unsloth"]:
    import unsloth  # noqa: F401

import gc
import json
import os
import re
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from studies.adapters.rows import Row
from tigon.presets import preset_config

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIGER = {"llama-3-8b": "apply_liger_kernel_to_llama", "qwen3-1.7b": "apply_liger_kernel_to_qwen3"}
LONGEST = 8192  # positions of a model, unless a case is longer
LEFT_GIB = 4.0  # a worker that holds more than that between two cases ends, and a fresh one takes over


# ---------------------------------------------------------------------------------------------------------- the models


def make_config(row: Row, overrides: dict[str, Any]) -> Any:
    layers = {"num_hidden_layers": row.layers} if row.layers and "num_hidden_layers" not in overrides else {}
    config = preset_config(
        row.model, max_position_embeddings=max(row.seq, LONGEST), bos_token_id=1, eos_token_id=2, pad_token_id=3,
        **layers, **overrides,
    )  # fmt: skip
    config.use_cache = False
    return config


def build_frozen(config: Any, device: torch.device, quantized: str) -> nn.Module:
    """The frozen model in bf16; if quantized, its linear layers but the head in nf4."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # transformers' sdpa has no softcap; it refuses such a model.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    model.config.use_cache = False
    if quantized:
        quantize(model, device, quantized)
    model.requires_grad_(False)
    return model


def quantize(model: Any, device: torch.device, form: str) -> None:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    for parent, name, layer in linears(model):
        if layer is model.lm_head:
            continue
        bias = layer.bias
        made = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=bias is not None, compute_dtype=torch.bfloat16, quant_type=form,
            device="meta",
        )  # fmt: skip
        made.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type=form, compress_statistics=True
        )
        if bias is not None:
            made.bias = bias
        setattr(parent, name, made.to(device))
        layer.register_parameter("weight", None)  # the list of layers would keep it
    model.is_loaded_in_4bit = True
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.empty_cache()


def linears(model: nn.Module, kind: str = "Linear") -> list[tuple[nn.Module, str, Any]]:
    """The layers whose class has this name, with their parents."""
    return [
        (parent, name, layer)
        for parent in list(model.modules())
        for name, layer in list(parent.named_children())
        if type(layer).__name__ == kind
    ]


def use_fp32(model: Any) -> Any:
    """The same numbers in fp32, in plain linear layers: what all sides are compared with."""
    for parent, name, layer in linears(model, "Linear4bit"):
        import bitsandbytes as bnb

        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(weight.to(torch.bfloat16).float(), requires_grad=False)
        made.bias = layer.bias
        setattr(parent, name, made)
    model.is_loaded_in_4bit = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.float()


def list_trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The adapters' parameters, by names that all sides share."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [(name[name.index("layers.") :].replace(".default", ""), p) for name, p in found]


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Give the adapters the same numbers on every side."""
    for name, p in list_trained(model):
        generator = torch.Generator(device=p.device).manual_seed(zlib.crc32(name.encode()))
        std = p.shape[1] ** -0.5 if "lora_A" in name else 0.01
        p.copy_(torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32) * std)


# ----------------------------------------------------------------------------------------------------------- the sides


def build(row: Row, device: torch.device, overrides: dict[str, Any]) -> tuple[Any, Callable[[], str]]:
    """The model of a side, and a function that says what was replaced in it."""
    config = make_config(row, overrides)
    if row.side == "unsloth":
        model, said = of_unsloth(row, config, device)
    else:
        model, said = of_peft(row, config, device)
    settle(model)
    return model, said


def of_peft(row: Row, config: Any, device: torch.device) -> tuple[Any, Callable[[], str]]:
    from peft import LoraConfig, get_peft_model

    if row.side == "liger":
        import liger_kernel.transformers as liger

        getattr(liger, LIGER[row.model])()
    base = build_frozen(config, device, row.quantized)
    if row.side == "fp32":
        base = use_fp32(base)
    lora = LoraConfig(
        r=row.rank, lora_alpha=2 * row.rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = get_peft_model(base, lora)
    if row.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # as TRL's trainer does with PEFT
    model.train()
    if not row.side.startswith("tigon"):
        return model, lambda: ""
    import tigon

    level = "mlp" if "mlp" in row.side else "cheap"
    fp8: bool | tigon.FP8 = False
    if "fp8" in row.side:
        fp8 = tigon.FP8(base="release" if row.side.endswith("release") else "keep")
    fusion = tigon.fuse(model, recompute=level, offload=row.side.endswith("offload"), fp8=fp8)
    return model, lambda: str(fusion.report())


def of_unsloth(row: Row, config: Any, device: torch.device) -> tuple[Any, Callable[[], str]]:
    """FastLanguageModel as its notebooks use it; only the reading of weights is replaced, by random ones made there."""
    import transformers
    import unsloth
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from unsloth import FastLanguageModel

    folder = tempfile.mkdtemp()
    save_tokenizer(folder, config.vocab_size)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    before = transformers.AutoModelForCausalLM.from_pretrained

    def made(*_: Any, **__: Any) -> Any:
        own = type(config).from_pretrained(folder)
        own.use_cache = False
        model = build_frozen(own, device, row.quantized)
        model.config._name_or_path = folder  # type: ignore[union-attr]
        return model

    checkpoints: Any = "unsloth" if row.checkpointing else False  # its own, which offloads
    longest = config.max_position_embeddings
    transformers.AutoModelForCausalLM.from_pretrained = made
    try:
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=longest, dtype=torch.bfloat16, load_in_4bit=bool(row.quantized),
            local_files_only=True, use_gradient_checkpointing=checkpoints,
        )  # fmt: skip
    finally:
        transformers.AutoModelForCausalLM.from_pretrained = before
    model = FastLanguageModel.get_peft_model(
        model, r=row.rank, lora_alpha=2 * row.rank, target_modules=PROJECTIONS, lora_dropout=0, bias="none",
        use_gradient_checkpointing=checkpoints,
    )  # fmt: skip
    FastLanguageModel.for_training(model)
    model.train()
    return model, lambda: f"unsloth {unsloth.__version__}"


def save_tokenizer(folder: str, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<s>", "</s>", "<pad>")
    words = {word: number for number, word in enumerate(special)} | {f"w{n}": n for n in range(4, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        model_max_length=LONGEST,
    ).save_pretrained(folder)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(
    row: Row, device: torch.device, *, overrides: dict[str, Any], warm: int, steps: int, references: Path
) -> Row:
    """Fill a row. references: the folder in which the fp32 side leaves its gradients, and the others find them."""
    began = time.perf_counter()
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    model, said = build(row, device, overrides)
    own = list_trained(model)
    if not own or any("lora_" not in name for name, _ in own):
        raise RuntimeError(f"the adapters alone should be trained, got {[name for name, _ in own][:3]}")
    parameters = [p for _, p in own]
    row.trained = sum(p.numel() for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=cuda)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (row.batch, row.seq), generator=generator).to(device)
    labels = ids.clone()
    labels[:, : row.seq // 8] = -100
    if cuda:
        row.weights_gib = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()

    def loss_of() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=row.side != "fp32"):
            return model(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if row.measure == "gradients":
        loss = loss_of()
        loss.backward()
        row.loss = loss.item()
        compare(row, {name: p.grad.float().cpu() for name, p in own if p.grad is not None}, references)
    elif row.measure == "memory":
        row.loss = step().item()
    else:
        for _ in range(warm):
            step()
        wait()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        issued = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            issued.append(1e3 * (time.perf_counter() - start))
            wait()
            row.steps_ms.append(1e3 * (time.perf_counter() - start))
        row.step_ms, row.host_ms = statistics.median(row.steps_ms), statistics.median(issued)
        row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
        row.loss = loss.item()
    if cuda:
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        row.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    row.note = said()
    row.wall_s = time.perf_counter() - began
    return row


def compare(row: Row, found: dict[str, torch.Tensor], references: Path) -> None:
    """Keep the gradients of fp32; hold those of another side to them."""
    path = references / f"{row.model}-{row.quantized or 'bf16'}.pt"
    if row.side == "fp32":
        torch.save((row.loss, found), path)
        return
    if not path.exists():
        raise RuntimeError("the fp32 side left no gradients to compare with")
    wanted, exact = torch.load(path)
    if exact.keys() != found.keys():
        missing = sorted(exact.keys() ^ found.keys())
        raise RuntimeError(f"the adapters with gradients differ from fp32's: {', '.join(missing[:3])}")

    def distance(part: str) -> float:
        names = [name for name in exact if part in name]
        away = sum(float((found[name] - exact[name]).double().square().sum()) for name in names)
        return float((away / sum(float(exact[name].double().square().sum()) for name in names)) ** 0.5)

    row.loss_error = row.loss - wanted
    row.error, row.error_a, row.error_b = distance("lora_"), distance("lora_A"), distance("lora_B")
    each = {name: float((found[name] - g).norm() / g.norm().clamp(min=1e-30)) for name, g in exact.items()}
    row.worst = max(each, key=lambda name: each[name])
    if not all(bool(torch.isfinite(g).all()) for g in found.values()):
        row.status, row.reason, row.error = "wrong", "a gradient is not finite", None


# ----------------------------------------------------------------------------------------------------------- the worker


def answer(request: dict[str, Any], measure: Callable[..., Row] = measure) -> Row:
    row, device = Row(**request["row"]), torch.device(request["device"])
    options = {name: request[name] for name in ("overrides", "warm", "steps")}
    try:
        return measure(Row(**request["row"]), device, references=Path(request["references"]), **options)
    except ModuleNotFoundError as error:
        return replace(row, status="failed", reason=f"{error.name} is not installed")
    except Exception as error:  # a peer may fail in any way, and its row says how
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return replace(row, status="failed", reason="out of memory")
        if "TRACE" in os.environ:
            import traceback

            traceback.print_exc()
        reason = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()
        return replace(row, status="failed", reason=reason[:200])


def serve(peer: str, ready: Path, measure: Callable[..., Row] = measure) -> int:
    """Answer requests, a line of JSON each, by a file; end early where this process is no longer fit to measure."""
    import peft  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    if peer == "peft":
        import tigon.fusion.engine.model  # noqa: F401

    ready.touch()
    for line in sys.stdin:
        request = json.loads(line)
        row = answer(request, measure)
        gc.collect()
        left = 0.0
        if torch.cuda.is_available() and "CUDA error" not in row.reason:
            torch.cuda.empty_cache()
            left = torch.cuda.memory_allocated() / 2**30
        path = Path(request["result"])
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row.to_dict()))
        part.replace(path)
        print(row.model, row.side, row.status, row.reason, f"{left:.2f} GiB left", flush=True)
        if "CUDA error" in row.reason or left > LEFT_GIB:
            break
    sys.stdout.flush()
    os._exit(0)  # not sys.exit: after an error of the device its cleaning up can hang


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], Path(sys.argv[2])))
