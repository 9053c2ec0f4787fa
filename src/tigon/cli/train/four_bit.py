"""Models with stacked experts in 4 bits: `--load_in_4bit` of transformers leaves the experts as they are.

The model is loaded on the CPU. Linear layers and stacks reach the GPU one at a time, and stay there in 4 bits:
gpt-oss's experts in the MXFP4 numbers of its checkpoint, other experts in nf4.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils.quantization_config import QuantizationMethod

from tigon.cli.memory import choose_format
from tigon.cli.model import Source, load_model, random_model, stored_form
from tigon.cli.train.options import TrainOptions, trl
from tigon.fusion.quantized_experts import find_stacks, quantize_experts


def load_linears(source: Source, options: TrainOptions) -> Any:
    """Load a model with stacked experts, with its linear layers in 4 bits; None for models that transformers loads.

    Linear layers except the head become layers of bitsandbytes, as `--load_in_4bit` says. `place_experts` goes on.
    A reward model, which gets a new head, is loaded by TRL: its experts stay dense.
    """
    stored = stored_form(source.config)
    is_loadable = source.weights and stored in (None, "mxfp4") and options.task != "reward"
    if not (options.model.load_in_4bit and is_loadable):
        return None
    config = copy.deepcopy(source.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        if not find_stacks(random_model(config)):
            return None
    if stored:
        fields = source.config.quantization_config
        fields = fields if isinstance(fields, dict) else fields.to_dict()
        config.quantization_config = {**fields, "dequantize": True}
    own = dict(options.trainer.model_init_kwargs or {})
    # The weights' own class, as TRL chooses: some models have another class without the tower.
    kind = getattr(transformers, (config.architectures or ("",))[0], None)
    model: Any = load_model(source, own.pop("dtype", None), kind, config=config, device_map=None, **own)
    for holder in (model, model.config):  # the weights are dense now
        for name in ("hf_quantizer", "quantization_config", "is_quantized"):
            vars(holder).pop(name, None)
    model.requires_grad_(False)
    _quantize_linears(model, trl.get_quantization_config(options.model), options.trainer.device)
    model.is_loaded_in_4bit = True  # PEFT then adds its adapters for layers of bitsandbytes
    # The trainer does not move such a model to the GPU, where dense experts may have no room.
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    return model


def _quantize_linears(model: Any, config: Any, device: torch.device) -> None:
    """Replace linear layers except the head by bitsandbytes' layers. config: a transformers.BitsAndBytesConfig."""
    import bitsandbytes as bnb

    head, nested = model.get_output_embeddings(), config.bnb_4bit_use_double_quant
    options = {"quant_type": config.bnb_4bit_quant_type, "quant_storage": config.bnb_4bit_quant_storage}
    for name, linear in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]:
        has_bias, dtype = linear.bias is not None, linear.weight.dtype
        with torch.device("meta"):
            layer = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, has_bias, compute_dtype=dtype, compress_statistics=nested,
                **options,
            )  # fmt: skip
        layer.bias = linear.bias
        layer.weight = bnb.nn.Params4bit(
            linear.weight.detach(), requires_grad=False, compress_statistics=nested, module=layer, **options
        )
        model.set_submodule(name, layer.to(device))  # quantizes


def place_experts(model: Any, source: Source, device: torch.device) -> None:
    """Store the experts of a model from `load_linears` in 4 bits, after PEFT has added its adapters, and move the rest.

    PEFT nests the adapters of parametrized parameters in another order, and its checkpoints name them by the order:
    adapters come first, as where they are merged.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    del inner.quantization_method
    quantize_experts(model, choose_format(source.config), device=device)
    model.to(device)
