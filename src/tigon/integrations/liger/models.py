"""apply_liger_kernel_to_*: tigon.fuse(model) on the instance that is given, with the flags by Liger's names.

Liger without an instance replaces classes, functions and torch.nn.functional.cross_entropy in the whole process, for
every model built from then on. Nothing here does that, so without an instance these functions raise.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tigon.fusion.engine.model import PARTS, Fusion, fuse

# Liger's flags, and the matching parts of tigon.fuse.
FLAGS: dict[str, tuple[str, ...]] = {
    "rope": ("rotary",),
    "cross_entropy": ("head",),
    "fused_linear_cross_entropy": ("head",),
    "rms_norm": ("norm",),
    "layer_norm": ("norm",),
    "swiglu": ("mlp", "experts"),
    "geglu": ("mlp",),
    "relu_squared": ("mlp",),
}
_SWIGLU = "rope cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
_GEGLU = "rope cross_entropy fused_linear_cross_entropy rms_norm geglu model"
_VISION = "cross_entropy fused_linear_cross_entropy rms_norm layer_norm model **"
# Each family's arguments, in Liger's order; ** for any flag of the inner models.
ARGUMENTS: dict[str, str] = {
    **dict.fromkeys((
        "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "glm4", "glm4v", "glm4v_moe", "gpt_oss",
        "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3",
        "phi3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl",
        "qwen3_vl_moe", "smollm3",
    ), _SWIGLU),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), _GEGLU),
    **dict.fromkeys(("gemma3", "gemma4", "paligemma"), _GEGLU.replace("rms_norm", "layer_norm rms_norm")),
    **dict.fromkeys(("mllama", "muse_glimmer"), _SWIGLU.replace("rms_norm", "layer_norm rms_norm")),
    **dict.fromkeys(("internvl", "smolvlm"), _VISION),
    "llama4": _SWIGLU + " layer_norm",
    "llava": "cross_entropy fused_linear_cross_entropy model **",
    "nemotron": "relu_squared cross_entropy fused_linear_cross_entropy model **",
    "pixtral": "rope rms_norm swiglu model",
    "qwen2_vl": _SWIGLU.replace("rms_norm", "rms_norm layer_norm"),
}  # fmt: skip
# Model types that use another family's function.
OTHER_TYPES = {"llama4_text": "llama4", "mllama_text_model": "mllama"} | {
    f"{family}_text": family
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
}


def is_transformers_available() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> Fusion:
    """Raise: Liger patches all models of this type, and here there is none to fuse."""
    return _fuse_by_flags("_apply_liger_kernel", None, {}, ())


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Fusion:
    """`tigon.fuse(model)` for a model of any type.

    Args:
        model: a transformers model.
        kwargs: Liger's flags, as in `TrainingArguments.liger_kernel_config`. Flags that the function for this model
            type does not take are ignored, as in Liger; names that no function takes are ignored with a warning.
    """
    for flag in kwargs.keys() - FLAGS.keys():
        warnings.warn(
            f"_apply_liger_kernel_to_instance: {flag!r} is not one of the flags {', '.join(FLAGS)} and is ignored.",
            stacklevel=2,
        )
    model_type = getattr(getattr(model, "config", None), "model_type", None) or ""
    names = _list_flags(OTHER_TYPES.get(model_type, model_type))
    return _fuse_by_flags(
        "_apply_liger_kernel_to_instance", model, {k: v for k, v in kwargs.items() if k in names}, names
    )


def _list_flags(family: str) -> tuple[str, ...]:
    arguments = ARGUMENTS.get(family, "**").split()
    return tuple(FLAGS if "**" in arguments else (name for name in arguments if name in FLAGS))


def _check_flags(name: str, given: Iterable[str]) -> None:
    for flag in given:
        if flag not in FLAGS:
            raise TypeError(f"{name}: its flags are {', '.join(FLAGS)}, got {flag!r}.")


def _fuse_by_flags(name: str, model: nn.Module | None, given: dict[str, Any], names: Collection[str]) -> Fusion:
    """Fuse the model. given: explicit flags; the others are on. names: the function's flags."""
    if model is None:
        raise ValueError(
            f"{name}: model must be given, since Tigon does not patch the whole process: pass model=…, or call "
            "tigon.fuse(model) once the model is built."
        )
    norms = {flag: bool(given[flag]) for flag in ("rms_norm", "layer_norm") if flag in given}
    if len(set(norms.values())) > 1:
        raise ValueError(
            f"{name}: rms_norm and layer_norm must be both on or both off, since tigon.fuse has one part for norms, "
            f"got {' and '.join(f'{flag}={value}' for flag, value in norms.items())}."
        )
    # Both cross-entropy flags switch the head: the loss builds no logits, but code that reads the logits gets them.
    kinds = [flag for flag in ("cross_entropy", "fused_linear_cross_entropy") if flag in names]
    head = not kinds or given.get("cross_entropy", False) or given.get("fused_linear_cross_entropy", True)
    off = {flag for flag, wanted in given.items() if not wanted} - set(kinds)
    off |= set() if head else set(kinds)
    options: dict[str, Any] = {"parts": PARTS.difference(*(FLAGS[flag] for flag in off))}
    present = vars(model).get("_tigon_fusion")
    if present is not None:
        # In Liger a second call adds to the first: a part is on if either call enables it.
        before = {f.name: getattr(present._options, f.name) for f in dataclasses.fields(present._options)}
        options = {**before, "parts": options["parts"].union(before["parts"])}
        if set(options["parts"]) != set(before["parts"]):
            present.remove()
    fusion = fuse(model, **options)
    fusion._ledger.check_arguments = check_forward_arguments
    return fusion


def _make_function(family: str, arguments: str) -> Callable[..., Fusion]:
    name = f"apply_liger_kernel_to_{family}"
    defaults = {"model": None, "cross_entropy": False}
    kinds = inspect.Parameter
    parameters = [
        kinds("kwargs", kinds.VAR_KEYWORD)
        if argument == "**"
        else kinds(argument, kinds.POSITIONAL_OR_KEYWORD, default=defaults.get(argument, True))
        for argument in arguments.split()
    ]
    signature = inspect.Signature(parameters)

    def apply(*args: Any, **kwargs: Any) -> Fusion:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        model = given.pop("model", None)
        _check_flags(name, given)
        return _fuse_by_flags(name, model, given, _list_flags(family))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"`tigon.fuse(model)` for a {family} model. Flags default to on."
    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


globals().update({f"apply_liger_kernel_to_{family}": _make_function(family, ARGUMENTS[family]) for family in ARGUMENTS})
# Other libraries import this table to see which model types have a function.
MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., Fusion]] = {
    model_type: globals()[f"apply_liger_kernel_to_{family}"]
    for model_type, family in ({family: family for family in ARGUMENTS} | OTHER_TYPES).items()
}


# ---------------------------------------------------------------------------- keyword arguments of Liger's forwards

_LOSS = "call LigerForCausalLMLoss or tigon.linear_cross_entropy with the hidden states and the head's weight"
_ROWS = "tigon.linear_logprob has is_top1 for each token"
# Each argument's default, and how to get the result that the argument requests.
FORWARD_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "lse_square_scale": (0.0, _LOSS),
    "label_smoothing": (0.0, _LOSS),
    "ce_weight": (None, _LOSS),
    "use_token_scaling": (False, _LOSS),
    "accum_dtype": (None, _LOSS),
    "return_token_accuracy": (False, _ROWS),
    "return_predicted_tokens": (False, _ROWS),
}


def check_forward_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a fused model would not honour.

    Args:
        arguments: the keyword arguments in a call to the model.
    Raises: ValueError for an argument of Liger's forwards that requests another loss or another result, and for
        skip_logits=True without labels, as Liger does. skip_logits=False needs nothing: code that reads the logits gets
        them.
    """
    for name, (default, instead) in FORWARD_ARGUMENTS.items():
        value = arguments.get(name, default)
        if value is not None and value is not default and (isinstance(value, Tensor) or value != default):
            raise ValueError(
                f"tigon.integrations.liger: the model's forward must not be given {name}={value!r}: the model computes "
                f"its own loss, which has no such option, and would silently ignore it; {instead}."
            )
    if arguments.get("skip_logits") and arguments.get("labels") is None and arguments.get("shift_labels") is None:
        raise ValueError("tigon.integrations.liger: skip_logits is True, but labels and shift_labels are None.")
