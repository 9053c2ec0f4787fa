"""Save and load compressed models: plain safetensors plus each layer's storage layout in the configuration.

For transformers models the layout is in `config.quantization_config` under the method "tigon", which `save_pretrained`
also writes. `load` registers the method with transformers. Without `load`, from_pretrained warns about an unknown
method and missing weights, and fills the weights with random numbers. Other modules get a `compress.json` beside the
tensors.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.embedding import ByteEmbedding
from tigon.compress.layers import SplitLinear, built, layout_of
from tigon.compress.report import swap
from tigon.files import DamagedFileError, load_state, read_json, read_tensors
from tigon.manifest import MANIFEST, check_manifest, write_manifest

FORMAT = 1
METHOD = "tigon"
WEIGHTS, LAYOUT = "model.safetensors", "compress.json"


def layout(model: nn.Module) -> dict[str, Any]:
    """JSON layout: the compressed layers and their storage."""
    layers, tables = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, SplitLinear):
            layers[name] = {**layout_of(module), "transposed": _transposed(module)}
        elif isinstance(module, ByteEmbedding):
            tables[name] = [module.num_embeddings, module.embedding_dim]
        elif "pruned_from" in vars(module):
            size = [module.in_features, module.out_features]
            before = {"from": list(vars(module)["pruned_from"]), "transposed": _transposed(module)}
            layers[name] = {"pruned": size, "bias": module.bias is not None, **before}
    return {"format": FORMAT, "layers": layers, "embeddings": tables}


def describe(model: Any) -> None:
    """Write the layout to a transformers model's configuration, or remove it if no layer is compressed."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return
    found = layout(model)
    if found["layers"] or found["embeddings"]:
        config.quantization_config = hosted()[0](**found)
    elif getattr(getattr(config, "quantization_config", None), "quant_method", None) == METHOD:
        del config.quantization_config


def rebuild(model: nn.Module, found: dict[str, Any]) -> None:
    """Replace a model's layers with empty layers in this layout.

    Raises: ValueError for a layout from another version or model, or without layers.
    """
    if found.get("format") != FORMAT:
        raise ValueError(
            f"load: the model has layout {found.get('format')!r}, and this version of Tigon reads {FORMAT}."
        )
    try:
        new = _empty_layers(found)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFileError(f"load: the layout describes no layers ({error!r}).") from error
    for name in new:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"load: the layout names a layer {name}, which the model does not have.") from None
    swap(model, new)


def _empty_layers(found: dict[str, Any]) -> dict[str, nn.Module]:
    new: dict[str, nn.Module] = {}
    for name, row in found["layers"].items():
        if "pruned" in row:
            width, out = row["pruned"]
            new[name] = nn.Linear(width, out, bias=row["bias"])
            vars(new[name])["pruned_from"] = tuple(row["from"])
        else:
            new[name] = built(row)
        vars(new[name])["transposed"] = row["transposed"]
    for name, (rows, width) in found["embeddings"].items():
        new[name] = ByteEmbedding(rows, width, torch.get_default_dtype())
    return new


def save(model: Any, folder: str | Path, *, tokenizer: Any = None) -> None:
    """Save a compressed model, which `load` opens without the original weights.

    Args:
        model: a transformers model (`save_pretrained` writes the same files), or any module.
        folder: created if missing.
        tokenizer: saved with the model.
    Raises: ValueError if no layer in the model is compressed.
    """
    found = layout(model)
    if not found["layers"] and not found["embeddings"]:
        raise ValueError("save: nothing in the model is compressed; save it as it is, or compress it first.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        describe(model)
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file

        tensors: dict[int, str] = {}
        state = {}
        for name, tensor in model.state_dict().items():  # write tied tensors once
            if tensors.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name) == name:
                state[name] = tensor.contiguous()
        save_file(state, str(folder / WEIGHTS))
        (folder / LAYOUT).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_manifest(folder, sorted(file.name for file in folder.iterdir() if file.name != MANIFEST))


def load(folder: str | Path, model: nn.Module | None = None, *, dense: bool = False, **options: Any) -> Any:
    """Load a compressed model written by `save` or `save_pretrained`.

    Args:
        folder: the saved folder.
        model: a module built like the original, required for modules outside transformers; changed in place.
        dense: dequantize all layers as `widen` does: dense speed and dense size.
        options: passed to `from_pretrained`.
    Returns: the model, in evaluation mode.
    Raises: ValueError for a folder without a compressed model, and for damaged files.
    """
    folder = Path(folder)
    if model is not None:
        if not (folder / LAYOUT).is_file():
            raise ValueError(f"load: {folder} has no {LAYOUT}, so save() has not written it.")
        check_manifest(folder)
        rebuild(model, read_json(folder / LAYOUT))
        tensors = read_tensors(folder / WEIGHTS)
        own = {name for name, _ in model.named_parameters()}  # tied tensors have one name here and two in the state
        load_state(model, tensors, folder / WEIGHTS, ignore=lambda name: name not in own and name not in tensors)
        opened: Any = model.eval()
    else:
        opened = _hosted_model(folder, options)
    return widen(opened) if dense else opened


def _hosted_model(folder: Path, options: dict[str, Any]) -> Any:
    import transformers

    if not (folder / "config.json").is_file():
        raise ValueError(f"load: {folder} has no config.json; give model= for what is no model of transformers.")
    check_manifest(folder)
    fields = read_json(folder / "config.json")
    stored = fields.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != METHOD:
        raise ValueError(f"load: the model in {folder} is not compressed by Tigon; open it by from_pretrained.")
    hosted()
    kind = getattr(transformers, (fields.get("architectures") or ["AutoModel"])[0], transformers.AutoModel)
    try:
        return kind.from_pretrained(folder, **options).eval()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever transformers raises for damaged files
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedFileError(f"load: {folder} holds no model that can be loaded: {said}") from error


@torch.no_grad()
def widen(model: nn.Module) -> Any:
    """Replace all compressed layers with dense layers, in place: original speed and size.

    Pruned neurons are restored as zeros, so that shapes match the configuration.

    Args:
        model: with layers compressed by `feed_forward` or `embeddings`; other models are unchanged.
    Returns: the model.
    """
    new: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, ByteEmbedding):
            new[name] = nn.Embedding.from_pretrained(module.widened(), freeze=False)
        elif isinstance(module, SplitLinear):
            new[name] = _linear(module.weight, module.bias, _transposed(module))
        elif "pruned_from" in vars(module):
            new[name] = _padded(module, *vars(module)["pruned_from"])
        if name in new:
            new[name].train(module.training)
    swap(model, new)
    describe(model)
    return model


def _transposed(module: nn.Module) -> bool:
    return bool(vars(module).get("transposed", False))


def _padded(module: Any, out: int, width: int, halves: int) -> nn.Module:
    """Pad the kept neurons with zeros; with gate above up, pad each half."""
    weight, bias = module.weight, module.bias
    rows = [nn.functional.pad(w, (0, width - w.shape[1], 0, out // halves - len(w))) for w in weight.chunk(halves)]
    if bias is not None:
        bias = torch.cat([nn.functional.pad(b, (0, out // halves - len(b))) for b in bias.chunk(halves)])
    return _linear(torch.cat(rows), bias, _transposed(module))


def _linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    made: Any
    if transposed:
        from transformers.pytorch_utils import Conv1D

        made = Conv1D(*weight.shape)  # type: ignore[no-untyped-call]
        made.weight = nn.Parameter(weight.t().contiguous())
        made.bias = nn.Parameter(torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().clone())
        return made  # type: ignore[no-any-return]
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made  # type: ignore[no-any-return]


@functools.cache
def hosted() -> tuple[Any, Any]:
    """Register Tigon's configuration and quantizer with transformers and return the classes."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class TigonConfig(QuantizationConfigMixin):
        def __init__(self, format: int, layers: Any, embeddings: Any, **_: Any) -> None:
            vars(self)["quant_method"] = METHOD
            self.format, self.layers, self.embeddings = format, layers, embeddings

    @register_quantizer(METHOD)
    class TigonQuantizer(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            rebuild(model, vars(self.quantization_config))
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    return TigonConfig, TigonQuantizer
