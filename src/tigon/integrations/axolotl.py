"""Axolotl's plugin: two lines of YAML fuse the model that Axolotl trains.

    plugins:
      - tigon.integrations.axolotl.TigonPlugin

The plugin fuses the model in `post_model_load`, after Axolotl has applied its patches and adapters, so that fuse sees
them. Otherwise the plugin changes a single default: Axolotl's LoRA kernels replace the same layers, and with
`adapter: lora` or `qlora` Axolotl enables them unless the configuration sets them.

Source: Axolotl 0.19, `axolotl.integrations.base.BasePlugin`, https://docs.axolotl.ai/docs/custom_integrations.html
"""

from __future__ import annotations

from typing import Any, Literal

try:
    from axolotl.integrations.base import BasePlugin
    from axolotl.utils.logging import get_logger
    from pydantic import BaseModel, model_validator
except ImportError as error:
    raise ImportError(f"tigon.integrations.axolotl needs Axolotl, pip install axolotl: {error}.") from None

from tigon.fusion.engine.model import Fusion, fuse

OPTIONS = ("parts", "recompute", "offload", "fp8")
# Axolotl's switches for kernels that replace attention's and the MLP's forward. lora_embedding_kernel concerns a layer
# that Tigon leaves to PEFT.
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
LOG = get_logger(__name__)


def is_part_on(cfg: Any, kind: str) -> bool:
    """Whether a configuration leaves a part of tigon.fuse on."""
    parts = cfg.get("tigon_parts")
    return parts is None or kind in parts


class TigonArgs(BaseModel):
    """The plugin's fields in Axolotl's configuration: the arguments of tigon.fuse."""

    tigon_parts: list[str] | None = None
    tigon_recompute: Literal["auto", "none", "product", "cheap", "mlp"] | None = None
    tigon_offload: bool | None = None
    tigon_fp8: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def check_tigon_has_the_model_to_itself(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Liger patches transformers' classes too, so fuse could not recognise the forwards that Liger replaced.
        others = sorted(k for k, v in data.items() if k.startswith("liger_") and v)
        if data.get("cut_cross_entropy") and is_part_on(data, "head"):
            others.append("cut_cross_entropy")
        if is_part_on(data, "adapters"):
            others += [name for name in LORA_KERNELS if data.get(name)]
        if others:
            raise ValueError(
                f"TigonPlugin: {', '.join(others)} must be off, since Tigon replaces it, got true; "
                "or remove TigonPlugin from plugins."
            )
        return data


class TigonPlugin(BasePlugin):  # type: ignore[misc]
    """Calls tigon.fuse on each model that Axolotl loads; logs the report after training."""

    def __init__(self) -> None:
        super().__init__()
        self.fusions: list[Fusion] = []

    def register(self, cfg: Any) -> None:
        """Disable Axolotl's own LoRA kernels where the configuration, not validated yet, leaves them unset."""
        if cfg.get("adapter") in ("lora", "qlora") and is_part_on(cfg, "adapters"):
            for name in LORA_KERNELS:
                if cfg.get(name) is None:
                    cfg[name] = False

    def get_input_args(self) -> str:
        return "tigon.integrations.axolotl.TigonArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        options: dict[str, Any] = {k: v for k in OPTIONS if (v := cfg.get(f"tigon_{k}")) is not None}
        fusion = fuse(model, **options)
        self.fusions.append(fusion)
        LOG.info(f"tigon: {fusion.report().headline()}")

    def post_train(self, cfg: Any, model: Any) -> None:
        for fusion in self.fusions:
            LOG.info(f"tigon: {fusion.report()}")

    def post_train_unload(self, cfg: Any) -> None:
        self.fusions.clear()  # the Fusions hold the models that Axolotl has just released
