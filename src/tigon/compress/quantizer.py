"""transformers' quantization method "tigon", which this module registers when it is imported."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tigon.compress.layout import METHOD, build_layout


@register_quantization_config(METHOD)
class TigonConfig(QuantizationConfigMixin):
    """A layout, as `layout.get_layout` returns it."""

    def __init__(self, format: int, layers: Any, embeddings: Any, **_: Any) -> None:
        vars(self)["quant_method"] = METHOD
        self.format, self.layers, self.embeddings = format, layers, embeddings


@register_quantizer(METHOD)
class TigonQuantizer(HfQuantizer):
    """Builds the compressed layers before their weights are loaded."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        build_layout(model, vars(self.quantization_config))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
