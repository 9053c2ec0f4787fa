"""AutoLigerKernelForCausalLM: a model of transformers, fused."""

from __future__ import annotations

from typing import Any

from tigon.install import install
from tigon.integrations.liger.models import FLAGS, _apply_liger_kernel_to_instance

try:
    from transformers import AutoModelForCausalLM
except ImportError:
    raise ImportError(f"AutoLigerKernelForCausalLM needs transformers: {install('hf')}.") from None


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """transformers' AutoModelForCausalLM, whose models `tigon.fuse` has been called on.

    Keyword arguments may include Liger's flags (rope, rms_norm, …), as in `apply_liger_kernel_to_*`; all others go to
    transformers. Any model type is fused.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        # With output_loading_info=True transformers returns (model, loading info).
        _apply_liger_kernel_to_instance(loaded[0] if isinstance(loaded, tuple) else loaded, **flags)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        parent: Any = super()
        model = parent.from_config(config, **kwargs)
        _apply_liger_kernel_to_instance(model, **flags)
        return model
