"""Save and load compressed models: safetensors, with the layout in `config.json`.

Without `load`, from_pretrained warns about an unknown method and missing weights, and fills the weights with random
numbers. Modules outside transformers get a `compress.json` beside the tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.layers import ByteEmbedding, SplitLinear, make_linear
from tigon.compress.layout import METHOD, build_layout, get_layout, is_compressed, swap_layers, write_layout
from tigon.files import DamagedFileError, load_state, read_json, read_tensors
from tigon.manifest import MANIFEST, check_manifest, write_manifest

WEIGHTS, LAYOUT = "model.safetensors", "compress.json"


def save(model: Any, folder: str | Path, *, tokenizer: Any = None) -> None:
    """Save a compressed model, which `load` opens without the original weights.

    Args:
        model: a transformers model (`save_pretrained` writes the same files), or any module.
        folder: created if missing.
        tokenizer: saved with the model.
    Raises: ValueError if no layer in the model is compressed.
    """
    layout = get_layout(model)
    if not is_compressed(layout):
        raise ValueError("save: the model has no compressed layers; save directly, or compress first.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        write_layout(model)
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file

        names = _list_tensors(model)
        save_file({k: t.contiguous() for k, t in model.state_dict().items() if k in names}, str(folder / WEIGHTS))
        (folder / LAYOUT).write_text(json.dumps(layout, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_manifest(folder, sorted(file.name for file in folder.iterdir() if file.name != MANIFEST))


def load(folder: str | Path, model: nn.Module | None = None, *, dense: bool = False, **options: Any) -> Any:
    """Load a compressed model written by `save` or `save_pretrained`.

    Args:
        folder: the saved folder.
        model: a module built like the original, required for modules outside transformers; changed in place.
        dense: dequantize all layers as `dequantize` does: dense speed and dense size.
        options: passed to `from_pretrained`.
    Returns: the model, in evaluation mode.
    Raises: ValueError for a folder without a compressed model, and for damaged files.
    """
    folder = Path(folder)
    if model is not None:
        if not (folder / LAYOUT).is_file():
            raise ValueError(f"load: {folder} has no {LAYOUT}, so save() did not write this folder.")
        check_manifest(folder)
        build_layout(model, read_json(folder / LAYOUT))
        tensors = read_tensors(folder / WEIGHTS)
        names = _list_tensors(model)
        load_state(model, tensors, folder / WEIGHTS, ignore=lambda name: name not in names and name not in tensors)
        opened: Any = model.eval()
    else:
        opened = _load_pretrained(folder, options)
    return dequantize(opened) if dense else opened


def _list_tensors(model: nn.Module) -> set[str]:
    """The names of parameters and buffers; tied tensors have one name here, and two in the state dict."""
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def _load_pretrained(folder: Path, options: dict[str, Any]) -> Any:
    if not (folder / "config.json").is_file():
        raise ValueError(f"load: {folder} has no config.json; pass model= for a model outside transformers.")
    check_manifest(folder)
    fields = read_json(folder / "config.json")
    stored = fields.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != METHOD:
        raise ValueError(f"load: the model in {folder} is not compressed by Tigon; use from_pretrained.")
    import transformers

    import tigon.compress.quantizer  # noqa: F401 - registers the method

    kind = getattr(transformers, (fields.get("architectures") or ["AutoModel"])[0], transformers.AutoModel)
    try:
        return kind.from_pretrained(folder, **options).eval()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever transformers raises for damaged files
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedFileError(f"load: {folder} holds no loadable model: {line}") from error


@torch.no_grad()
def dequantize(model: nn.Module) -> Any:
    """Replace all compressed layers with dense layers, in place: original speed and size.

    Pruned neurons are restored as zeros, so that shapes match the configuration.

    Args:
        model: with layers compressed by `feed_forward` or `embeddings`; other models are unchanged.
    Returns: the model.
    """
    new: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, ByteEmbedding):
            new[name] = nn.Embedding.from_pretrained(module.weight, freeze=False)
        elif isinstance(module, SplitLinear):
            new[name] = _restore_linear(module, module.weight, module.bias)
        elif "pruned_from" in vars(module):
            new[name] = _restore_linear(module, *_pad_neurons(module, *vars(module)["pruned_from"]))
        if name in new:
            new[name].train(module.training)
    swap_layers(model, new)
    write_layout(model)
    return model


def _pad_neurons(module: Any, out: int, width: int, halves: int) -> tuple[Tensor, Tensor | None]:
    """Pad the kept neurons with zeros; with gate above up, pad each half."""
    pad = nn.functional.pad
    weight, bias = module.weight, module.bias
    rows = [pad(w, (0, width - w.shape[1], 0, out // halves - len(w))) for w in weight.chunk(halves)]
    if bias is not None:
        bias = torch.cat([pad(b, (0, out // halves - len(b))) for b in bias.chunk(halves)])
    return torch.cat(rows), bias


def _restore_linear(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A dense layer in the class of the layer that was compressed: nn.Linear or transformers' Conv1D."""
    if not vars(module).get("transposed", False):
        return make_linear(weight, bias)
    from transformers.pytorch_utils import Conv1D

    layer: Any = Conv1D(*weight.shape)  # type: ignore[no-untyped-call]
    layer.weight = nn.Parameter(weight.t().contiguous())
    layer.bias = nn.Parameter(torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().clone())
    return layer  # type: ignore[no-any-return]
