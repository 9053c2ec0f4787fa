"""`tigon verify`: a model's loss and gradients, plain against fused, relative to the plain model's rounding."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.options import argument, device_option, json_option, option
from tigon.cli.problem import Problem, check_choice, find_device, needs
from tigon.cli.screen import screen, show

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

DTYPES = ("float32", "bfloat16", "float16")
# A fused result may be this many times as far from the reference as the plain result …
FACTOR = 2.0
# … or this far, relatively: a plain result may be right by chance. In units of the dtype's epsilon.
FLOOR = {"float32": 32.0, "bfloat16": 1.0, "float16": 2.0}
# Sizes for a model without weights. 128 columns show the same errors as 4096.
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "head_dim": 32, "vocab_size": 1024, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    model: str = argument("Model or adapter directory, config.json, hub name or preset.")
    layers: int | None = option(
        None, "Number of layers to build; 0 builds all layers. Default: 2, and all with --fp8.", min=0
    )
    full_width: bool = option(False, "Keep the original widths of a model without weights.")
    dtype: str = option("float32", f"{', '.join(DTYPES)}.")
    device: str = device_option()
    batch_size: int = option(2, "Sequences.", min=1)
    seq_len: int = option(64, "Tokens per sequence.", min=2)
    lora: int | None = option(None, "Add LoRA adapters with this rank to the model.", min=1)
    lora_targets: str = option("all-linear", "Layers with adapters, separated by commas.")
    lora_target_parameters: str = option("", "Parameters with adapters, such as stacked experts, separated by commas.")
    adapters: str | None = option(None, "Adapters saved by PEFT: folder, adapter_config.json or hub name.")
    against: str | None = option(
        None,
        "Compare a merged model's logits with this run's: run, checkpoint, model or adapter directory, or hub name.",
    )
    fp8: bool = option(False, "Measure how far FP8 moves the gradients, layer by layer, in place of the comparison.")
    data: Path | None = option(None, "With --fp8 or --against: text file for the batch; default: random tokens.")
    seed: int = option(0, "Seed for tokens and random weights.", min=0, max=2**32 - 1)
    json: bool = json_option()


def verify(options: VerifyOptions) -> None:
    """Compare a model's loss and gradients, plain against fused; the exit code is 1 when they differ.

    The measure is the plain model's own rounding: the distance to the same model in fp64. A model without weights gets
    random weights and small widths; so do adapters without weights. With adapters their own gradients are compared.

    With --against: compare a merged model's logits with those of the base model and its adapters.
    """
    needs("tigon verify", "train", "torch", "transformers")
    check_choice("", options, dtype=DTYPES)
    if options.data is not None and not options.fp8 and options.against is None:
        raise Problem("--data requires --fp8 or --against")
    if options.fp8 and options.dtype != "float32":
        raise Problem(f"--fp8 compares fp32, bf16 and FP8, and takes no --dtype, got {options.dtype}")
    device = find_device(options.device)
    if options.against is not None:
        _verify_merged(options, device)
        return
    from tigon.cli.adapters import add_adapters, find_adapted, new_adapters
    from tigon.cli.model import quiet_transformers

    source, adapters = find_adapted(options.model, options.adapters, options.lora)
    if options.lora:
        adapters = new_adapters(options.lora, options.lora_targets, 0.0, options.lora_target_parameters)
    import torch

    quiet_transformers()
    from tigon import fuse

    console = screen(quiet=options.json)
    dtype = torch.float32 if options.fp8 else getattr(torch, options.dtype)
    layers = options.layers if options.layers is not None else 0 if options.fp8 else 2
    torch.manual_seed(options.seed)
    with console.status("building the model"):
        model = _build(source, layers, options.full_width, dtype).to(device)
        if adapters is not None:
            saved = source.weights and adapters.place is not None
            model = add_adapters(model, adapters, saved=saved).train()
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (options.batch_size, options.seq_len), device=device)
    labels = ids.clone()
    labels[:, : options.seq_len // 8] = -100  # a prompt, excluded from the loss
    if options.fp8:
        _measure_fp8(options, source, model, ids, labels, console)
        return
    with console.status("running the model in fp64, plain and fused"):
        choices: list[Any] = []
        with _record_choices(choices):
            exact = _compute_gradients(_widen(model), ids, labels)
        with _repeat_choices(choices):
            plain = _compute_gradients(model, ids, labels)
        fusion = fuse(model)
        with _repeat_choices(choices):
            fused = _compute_gradients(model, ids, labels)
    rows = compare(exact, plain, fused, FLOOR[options.dtype] * torch.finfo(dtype).eps)
    report, reason = fusion.report(), _explain_kernels(ids, dtype)
    wrong = [row["name"] for row in rows if not row["equal"]]
    with_adapters = None if adapters is None else str(adapters)
    if options.json:
        found = {
            "model": source.name, "dtype": options.dtype, "device": device.type, "adapters": with_adapters,
            "rows": rows, "report": report.to_dict(), "kernels": reason is None,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
    else:
        show(report.to_rich())
        words = [source.name, f"{model.config.get_text_config().num_hidden_layers} layers", options.dtype]
        show(_make_table(rows, ", ".join([*words, with_adapters] if with_adapters else words)))
    if wrong:
        raise Problem(f"plain and fused differ by more than rounding in {', '.join(wrong)}", code=1)
    console.print("plain and fused agree: no difference is above rounding")
    if reason is not None:
        console.print(
            f"No kernel was tested: {reason}, so the fused model ran on PyTorch operators. Verify on a GPU, or "
            "set TRITON_INTERPRET=1 and TIGON_BACKEND=triton to interpret the kernels.",
            style="yellow",
        )


def _verify_merged(options: VerifyOptions, device: torch.device) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in ("layers", "full_width", "dtype", "lora", "fp8"):
        if getattr(options, name) != defaults[name]:
            raise Problem(f"--against compares whole models, and takes no --{name.replace('_', '-')}")
    from tigon.cli.against import verify_against
    from tigon.cli.model import quiet_transformers

    quiet_transformers()
    verify_against(options, device, screen(quiet=options.json))


def _measure_fp8(options: VerifyOptions, source: Any, model: Any, ids: Any, labels: Any, console: Any) -> None:
    from tigon.cli.fp8_noise import measure_noise, print_noise, read_batch
    from tigon.cli.model import load_tokenizer

    if options.data is not None:
        tokenizer = load_tokenizer(options.model, "MODEL")
        labels = ids = read_batch(options.data, tokenizer, options.batch_size, options.seq_len, ids.device)
    with console.status("running the model in fp32, bf16 and FP8"):
        rows, left = measure_noise(model, ids, labels)
    words = [source.name, f"{len(rows) - 1} layers", f"{ids.numel():,} tokens"]
    print_noise(rows, left, ", ".join(words), options.json)


def _explain_kernels(ids: Any, dtype: torch.dtype) -> str | None:
    """The reason why no Triton kernel ran on the device of ids; None if some did."""
    import torch

    from tigon.kernels import use_triton, why_not_triton

    sample = torch.empty(1, dtype=dtype, device=ids.device)
    return None if use_triton(sample) else why_not_triton(sample) or "the interpreter is used only when forced"


def _build(source: Any, layers: int, full_width: bool, dtype: torch.dtype) -> Any:
    import torch

    from tigon.cli.model import load_model, random_model, stored_form

    config = source.config
    if layers:
        _fewer_layers(config.get_text_config(), layers)
        if stored_form(config) == "tigon":
            _cut_layout(source)
    if source.weights:
        return load_model(source, dtype, config=config).train()
    if not full_width:
        narrow = copy.deepcopy(config)
        _narrow(narrow.get_text_config())
        model: Any
        try:
            model = random_model(narrow)
        except Problem:
            model = random_model(config)  # the widths depend on each other, so shrinking fails
    else:
        model = random_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Unit scales and zero biases, as initialized, would hide errors in their use.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).train()


def _fewer_layers(config: PretrainedConfig, layers: int) -> None:
    before = config.num_hidden_layers
    if layers >= before:
        return
    config.num_hidden_layers = layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:  # a list with an entry for each layer
            setattr(config, name, value[:layers])


def _cut_layout(source: Any) -> None:
    """Drop the layers that are not built from a compressed model's layout."""
    import torch

    from tigon.presets import auto_class

    config = source.config
    with torch.device("meta"):
        names = {name for name, _ in auto_class(config).from_config(config).named_modules()}
    stored = config.quantization_config
    fields = stored if isinstance(stored, dict) else vars(stored)
    for kind in ("layers", "embeddings"):
        fields[kind] = {name: row for name, row in fields[kind].items() if name in names}


def _narrow(config: PretrainedConfig) -> None:
    heads, kv = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    for name, value in TINY.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(value, getattr(config, name)))
    if heads and kv:
        config.num_key_value_heads = max(1, config.num_attention_heads * kv // heads)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int) and token >= config.vocab_size:
            setattr(config, name, None)


def _widen(model: Any) -> Any:
    wide = copy.deepcopy(model).double()
    inner = wide.get_base_model() if hasattr(wide, "get_base_model") else wide
    if getattr(type(inner), "_can_set_experts_implementation", lambda: False)():
        inner.set_experts_implementation("eager")  # grouped matrix products do not support fp64
    return wide


def _compute_gradients(model: Any, ids: Any, labels: Any) -> dict[str, Any]:
    """The loss and every parameter's gradient, in fp64."""
    model.zero_grad(set_to_none=True)
    # Dropout would differ between two runs.
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.p = 0.0
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    found = {"loss": loss.detach().double()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.detach().double().clone()
    model.zero_grad(set_to_none=True)
    return found


def _record_choices(into: list[Any]) -> Any:
    """A context that keeps the indices of every top-k: the experts that routers choose."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                into.append(found.indices)
            return found

    return Recorder()


def _repeat_choices(choices: list[Any]) -> Any:
    """A context in which every top-k takes recorded indices.

    Two experts whose scores differ by less than rounding would otherwise swap: then all numbers of a token change, and
    the comparison shows the swap instead of the model's rounding. Scores stay those of the model that runs.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Repeater(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.left = iter(choices)

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func not in (torch.topk, torch.Tensor.topk):
                return found
            indices = next(self.left, None)
            if indices is None or indices.shape != found.indices.shape:
                return found
            named = dict(zip(("input", "k", "dim"), args, strict=False)) | (kwargs or {})
            scores, dim = named["input"], named.get("dim", -1)
            return torch.return_types.topk((scores.gather(dim, indices), indices))

    return Repeater()


def compare(exact: dict[str, Any], plain: dict[str, Any], fused: dict[str, Any], floor: float) -> list[dict[str, Any]]:
    """A row for the loss and a row per parameter group: the same parameter in all layers.

    error: the distance to the fp64 result in the Euclidean norm, relative to that result; a row shows the worst tensor.
    """
    groups: dict[str, list[str]] = {}
    for name in exact:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    rows = []
    for group, names in groups.items():
        missing = [name for name in names if name not in fused or name not in plain]
        if missing:
            rows.append({"name": group, "tensors": len(names), "equal": False, "missing": missing})
            continue
        largest = _worst((fused[n] - plain[n]).abs().max().item() for n in names)
        of_plain = _worst(_error(plain[n], exact[n]) for n in names)
        of_fused = _worst(_error(fused[n], exact[n]) for n in names)
        bound = max(FACTOR * of_plain, floor)
        rows.append({
            "name": group, "tensors": len(names), "max_difference": largest, "error_plain": of_plain,
            "error_fused": of_fused, "bound": bound, "equal": bool(of_fused <= bound),  # False for NaN
        })  # fmt: skip
    return rows


def _worst(values: Iterable[float]) -> float:
    """The largest value, or NaN if any value is NaN, which max() would lose."""
    found = list(values)
    return max(found, key=lambda v: math.inf if math.isnan(v) else v)


def _error(value: Any, exact: Any) -> float:
    size = float(exact.norm())
    return float((value - exact).norm()) / (size if size > 0 else 1.0)


def _make_table(rows: list[dict[str, Any]], title: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    equal, differs = Text("equal", style="green"), Text("differs", style="red")
    table = Table(title=title, caption="error: relative distance from the fp64 result; the largest in each row")
    table.add_column("loss, and gradients of")
    for column in ("tensors", "|fused − plain|", "error, plain", "error, fused", "bound", ""):
        table.add_column(column, justify="right")
    for row in rows:
        # Names differ in their ends; without the common prefixes the table fits most terminals.
        name = row["name"].removeprefix("base_model.model.").removeprefix("model.").removesuffix(".weight")
        name = name.replace("layers.*.", "*.").replace(".default", "")
        if "missing" in row:
            table.add_row(name, str(row["tensors"]), "one side has no gradient", "", "", "", differs)
            continue
        values = [f"{row[key]:.1e}" for key in ("max_difference", "error_plain", "error_fused", "bound")]
        table.add_row(name, str(row["tensors"]), *values, equal if row["equal"] else differs)
    return table
