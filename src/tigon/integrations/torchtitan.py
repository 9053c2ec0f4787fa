"""torchtitan: a converter fuses norms and MLPs, and a loss component computes the loss without logits.

torchtitan 0.3, in a function of its config registry::

    from tigon.integrations.torchtitan import FuseConverter, LinearCrossEntropyLoss

    config.model_spec = model_registry("8B", converters=[FuseConverter.Config()])
    config.loss = LinearCrossEntropyLoss.Config()

torchtitan 0.2, in the TOML file, where the loss stays torchtitan's::

    [model]
    converters = ["tigon"]

    [experimental]
    custom_import = "tigon.integrations.torchtitan"

Either way a single model is fused, on the meta device, before it is parallelised, checkpointed and compiled.

Source: torchtitan 0.3 `ModelConfigConverter` and `ChunkedLossWrapper`, torchtitan 0.2 `ModelConverter`,
https://github.com/pytorch/torchtitan
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.fusion.engine.model import PARTS, fuse
from tigon.losses.head.head import Head
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import CrossEntropy

LAYERS = PARTS - {"head"}  # no labels reach torchtitan's model

try:
    import torchtitan  # noqa: F401
except ImportError as error:
    raise ImportError(f"tigon.integrations.torchtitan needs torchtitan, pip install torchtitan: {error}.") from None

try:
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError:
    ModelConfigConverter = None


# ------------------------------------------------------------------------------------------------ 0.2: the model itself


if ModelConfigConverter is None:
    from torchtitan.protocols.model_converter import register_model_converter

    class FuseConverter:
        """tigon.fuse for a model's norms, MLPs and rotary embeddings; no labels reach the model, so the head stays."""

        def __init__(self, job_config: Any, parallel_dims: Any) -> None:
            pass

        def convert(self, model: nn.Module) -> None:
            fuse(model, parts=LAYERS)

        def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
            pass

    register_model_converter(FuseConverter, "tigon")


# ------------------------------------------------------------------------------------- 0.3: the model's configuration


else:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    class FuseConverter(ModelConfigConverter):  # type: ignore[no-redef,misc]
        """A configuration whose model is built as before and then fused: norms, MLPs and rotary embeddings."""

        @dataclass(kw_only=True, slots=True)
        class Config(ModelConfigConverter.Config):
            parts: tuple[str, ...] = tuple(sorted(LAYERS))
            recompute: str = "auto"
            fp8: bool = False

        def __init__(self, config: Config) -> None:
            self.options: dict[str, Any] = {"parts": config.parts, "recompute": config.recompute, "fp8": config.fp8}

        def convert(self, model_config: Any) -> Any:
            options = self.options

            class Fused(type(model_config)):  # type: ignore[misc]
                __slots__ = ()

                def build(self, **kwargs: Any) -> nn.Module:
                    model = super().build(**kwargs)
                    fuse(model, **options)
                    return model

            Fused.__name__, Fused.__qualname__ = type(model_config).__name__, type(model_config).__qualname__
            return Fused(**{f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init})

    class LinearCrossEntropyLoss(ChunkedLossWrapper):  # type: ignore[misc]
        """Cross entropy of the head's logits, which are never built: tigon.linear_cross_entropy.

        The class is a ChunkedLossWrapper, because torchtitan passes the hidden states and the head to such a loss.
        torchtitan's own chunks still run if the head's weight is split over a tensor-parallel group, or if the inner
        loss takes further inputs.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(ChunkedLossWrapper.Config):
            pass

        def __init__(self, config: Config, *, compile_config: Any = None) -> None:
            if type(config.loss_fn) is not CrossEntropyLoss.Config:
                raise ValueError(
                    "LinearCrossEntropyLoss: loss_fn must be a CrossEntropyLoss.Config, which this loss replaces, got "
                    f"{type(config.loss_fn).__qualname__}."
                )
            super().__init__(config, compile_config=compile_config)

        def __call__(
            self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            head = self.lm_head
            if head is None:
                raise RuntimeError("LinearCrossEntropyLoss: set_lm_head() must be called before the first loss.")
            if loss_inputs or not _whole_head(head) or isinstance(pred, DTensor) or isinstance(labels, DTensor):
                return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)

            def forward(hidden: Tensor) -> Tensor:
                return linear_cross_entropy(
                    hidden, Head(head.weight, head.bias), labels, config=CrossEntropy(reduction="sum")
                )

            # The loss runs as the head's forward, so that FSDP2 gathers the weight and reduces the gradient.
            state = head.__dict__
            own = state.get("forward")
            state["forward"] = forward
            try:
                loss = head(pred)
            finally:
                if own is None:
                    del state["forward"]
                else:
                    state["forward"] = own
            return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


def _whole_head(head: nn.Module) -> bool:
    """Whether the head's forward is F.linear, and the weight has the whole vocabulary once gathered by FSDP."""
    import spmd_types
    from torchtitan.distributed.spmd_types import spmd_mesh_size

    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    if spmd_mesh_size("tp") > 1 or spmd_types.is_type_checking():
        return False
    weight = head.weight
    return not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ())
