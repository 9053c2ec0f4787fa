"""The attention in a decoder's layers."""

from __future__ import annotations

import dis
import inspect
from typing import Any

from torch import nn

from tigon.fusion.engine.bytecode import list_names
from tigon.fusion.shared_prefix.attention import find_registry

# What attention calls, and a recurrence does not.
SOFTMAX = {"softmax", "scaled_dot_product_attention"}
# What eager attention may read of the module, and take beside heads and a mask. Sinks come as an argument, too.
ATTRIBUTES = {"num_key_value_groups", "training", "head_dim", "sinks"}
OPTIONS = {"scaling", "dropout", "softcap", "sliding_window", "s_aux", "sinks", "position_bias"}


def list_attention(decoder: nn.Module) -> list[nn.Module]:
    """The causal attention modules in a decoder's layers that use transformers' attention registry."""
    asking = (m for m in list_inside(decoder) if find_registry(type(m))[0] is not None)
    return [m for m in asking if getattr(m, "is_causal", True) and not getattr(m, "is_cross_attention", False)]


def list_inside(decoder: nn.Module) -> list[nn.Module]:
    """The modules in a decoder's layers, without those of a tower for images or sound inside the decoder."""
    lists: list[nn.Module] = []
    for holder in decoder.modules():  # the decoder itself comes first
        own = [child for child in holder.children() if isinstance(child, nn.ModuleList)]
        if any(attends(m) and getattr(m, "is_causal", True) for layers in own for m in layers.modules()):
            lists += own
            if holder is decoder:
                break
    return list(dict.fromkeys(m for layers in lists or [decoder] for m in layers.modules() if m is not decoder))


def why_other_eager(eager: Any) -> str | None:
    """Why a file's own eager attention may be another than `tigon.varlen_attention`; None if nothing says so."""
    if not inspect.isfunction(eager):
        return None
    module, *others = inspect.signature(eager).parameters.values()
    found = [p.name for p in others[4:] if p.kind is not p.VAR_KEYWORD and p.name not in OPTIONS]
    loaded: Any = None
    for i in dis.get_instructions(eager):
        if i.opname in ("LOAD_ATTR", "LOAD_METHOD") and loaded == module.name and i.argval not in ATTRIBUTES:
            found.append(f"{module.name}.{i.argval}")
        loaded = i.argval if i.opname.startswith("LOAD_FAST") else None
        loaded = loaded[-1] if isinstance(loaded, tuple) else loaded  # two since Python 3.13
    return f"eager attention takes {', '.join(dict.fromkeys(found))}" if found else None


def reads_type_of_mask(forward: Any) -> bool:
    """Whether a forward asks for its mask's type, and so would take a mask that is not built for none."""
    loads = [i.argval for i in dis.get_instructions(inspect.unwrap(forward)) if i.opname.startswith("LOAD")]
    after = [loads[at + 1 : at + 2] for at, name in enumerate(loads) if name == "isinstance"]
    # Since Python 3.13 an instruction may load two variables.
    return any("attention_mask" in (name if isinstance(name, tuple) else (name,)) for names in after for name in names)


def takes_offsets(forward: Any) -> bool:
    """Whether a decoder's forward takes where documents begin, and so can hand this on to its layers."""
    code = inspect.unwrap(forward).__code__
    return bool(code.co_flags & inspect.CO_VARKEYWORDS) or "cu_seq_lens_q" in code.co_varnames[: code.co_argcount]


def attends(module: nn.Module) -> bool:
    """Whether a module is attention that takes a mask."""
    kind = type(module)
    if find_registry(kind)[0] is not None:
        return True
    if not kind.__module__.startswith("torch.") and "attention_mask" in list_parameters(kind):
        codes = (getattr(method, "__code__", None) for method in vars(kind).values())
        return any(code is not None and not SOFTMAX.isdisjoint(list_names(code)) for code in codes)
    return False


def list_parameters(kind: type) -> set[str]:
    code = getattr(inspect.unwrap(getattr(kind, "forward", None)), "__code__", None)  # type: ignore[arg-type]
    return set() if code is None else set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
