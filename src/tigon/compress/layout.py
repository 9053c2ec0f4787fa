"""A compressed model's layout: which layers are compressed, and how each is stored, as a dict of JSON values.

In transformers models the layout is `config.quantization_config` under the method "tigon", which `save_pretrained`
writes. `quantizer` registers the method, so that `from_pretrained` builds the layers before it loads the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tigon.compress.layers import ByteEmbedding, LowRank, Packed, SplitLinear
from tigon.files import DamagedFileError

FORMAT = 2
METHOD = "tigon"


def get_layout(model: nn.Module) -> dict[str, Any]:
    """The compressed layers and their storage; without any, both dicts are empty."""
    layers: dict[str, Any] = {}
    tables = {}
    for name, module in model.named_modules():
        marks = vars(module)
        if isinstance(module, SplitLinear):
            parts = [_describe_part(part) for part in module.parts]
            layers[name] = {"axis": module.axis, "bias": module.bias is not None, "parts": parts}
        elif isinstance(module, ByteEmbedding):
            tables[name] = [module.num_embeddings, module.embedding_dim]
        elif "pruned_from" in marks:
            size = [module.in_features, module.out_features]
            layers[name] = {"pruned": size, "bias": module.bias is not None, "from": list(marks["pruned_from"])}
        if name in layers:
            layers[name]["transposed"] = bool(marks.get("transposed", False))
    return {"format": FORMAT, "layers": layers, "embeddings": tables}


def _describe_part(part: Any) -> list[Any]:
    size = [part.in_features, part.out_features]
    if isinstance(part, Packed):
        return ["bits", *size, part.bits, part.group]
    return ["rank", *size, part.rank] if isinstance(part, LowRank) else ["dense", *size]


def is_compressed(layout: dict[str, Any]) -> bool:
    return bool(layout["layers"] or layout["embeddings"])


def write_layout(model: Any) -> None:
    """Write the layout to a transformers model's configuration, or remove it if no layer is compressed."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return
    layout, stored = get_layout(model), getattr(config, "quantization_config", None)
    if is_compressed(layout):
        config.quantization_config = {"quant_method": METHOD, **layout}
    elif METHOD in (getattr(stored, "quant_method", None), isinstance(stored, dict) and stored.get("quant_method")):
        del config.quantization_config


def build_layout(model: nn.Module, layout: dict[str, Any]) -> None:
    """Replace a model's layers with empty layers in this layout.

    Raises: ValueError for a layout from another version or model, or without layers.
    """
    if layout.get("format") != FORMAT:
        raise ValueError(
            f"load: the model has layout {layout.get('format')!r}, and this version of Tigon reads {FORMAT}."
        )
    try:
        new = _build_layers(layout)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFileError(f"load: the layout describes no layers ({error!r}).") from error
    for name in new:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"load: the layout names a layer {name}, which the model does not have.") from None
    swap_layers(model, new)


def _build_layers(layout: dict[str, Any]) -> dict[str, nn.Module]:
    kinds: dict[str, Any] = {"bits": Packed, "rank": LowRank}
    new: dict[str, nn.Module] = {}
    for name, row in layout["layers"].items():
        if "pruned" in row:
            width, out = row["pruned"]
            new[name] = nn.Linear(width, out, bias=row["bias"])
            vars(new[name])["pruned_from"] = tuple(row["from"])
        else:
            parts = [nn.Linear(s[0], s[1], bias=False) if k == "dense" else kinds[k](*s) for k, *s in row["parts"]]
            layer = new[name] = SplitLinear(row["axis"], parts)
            if row["bias"]:
                layer.bias = nn.Parameter(torch.empty(layer.out_features))
        vars(new[name])["transposed"] = row["transposed"]
    for name, (rows, width) in layout["embeddings"].items():
        new[name] = ByteEmbedding(rows, width, torch.get_default_dtype())
    return new


def swap_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Replace layers by name; return the replaced layers."""
    before = {}
    for name, layer in layers.items():
        owner, _, child = name.rpartition(".")
        parent = model.get_submodule(owner)
        before[name] = parent._modules[child]
        parent._modules[child] = layer
    return before  # type: ignore[return-value]
