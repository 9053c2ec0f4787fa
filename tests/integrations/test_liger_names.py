"""Every public name of the installed Liger-Kernel is here with its signature, or says why not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

from tigon.integrations import liger as ours

liger_kernel = pytest.importorskip("liger_kernel")

# Parameters of ours that differ, with the reason. Everything else has Liger's name, order, kind and default.
OTHER_DEFAULT = {
    # A flag that Liger has off or cannot do for a family is on: what may be fused is found in the model itself.
    **{("apply_liger_kernel_to_*", flag): "on" for flag in ("rope", "swiglu", "layer_norm")},
    ("apply_liger_kernel_to_granite", "cross_entropy"): "the loss without logits instead",
    ("apply_liger_kernel_to_granite", "fused_linear_cross_entropy"): "the loss without logits instead",
    # Liger wants these, and takes None.
    ("LigerFusedLinearJSD.forward", "shift_labels"): "optional",
    ("chunked_loss.liger_fused_linear_jsd", "student_bias"): "optional",
    ("chunked_loss.liger_fused_linear_jsd", "teacher_bias"): "optional",
    ("chunked_loss.liger_fused_linear_cosine", "student_bias"): "optional",
    ("chunked_loss.liger_fused_linear_cosine", "teacher_bias"): "optional",
}
USED: set[tuple[str, str]] = set()
PUBLIC = ("Liger", "liger_", "apply_liger", "_apply_liger", "Auto", "triton_", "is_", "CrossEntropyOutput")
# Defined in modules of liger_kernel.transformers, and no part of what it offers.
INTERNAL = {"liger_kernel.transformers.fsdp", "liger_kernel.transformers.trainer_integration"}


def public(module, *, own: bool = False) -> dict[str, object]:
    names = {name: getattr(module, name) for name in {*dir(module), *getattr(module, "__all__", ())}}
    return {
        name: value
        for name, value in names.items()
        if name.startswith(PUBLIC) and callable(value) and (not own or value.__module__ == module.__name__)
        # An autograd function is what a name is made of.
        if not (own and name.endswith("Function"))
    }


def names() -> dict[str, object]:
    import liger_kernel.transformers as transformers

    found = public(transformers)
    for info in pkgutil.iter_modules(transformers.__path__, transformers.__name__ + "."):
        if info.ispkg or info.name in INTERNAL:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # experts of a package that is not there
            continue
        found |= public(module, own=True)
    for place in ("loss_utils", "output_classes"):
        module = importlib.import_module(f"liger_kernel.transformers.model.{place}")
        found |= {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    found["lce_forward"] = importlib.import_module("liger_kernel.transformers.model.llama").lce_forward
    experimental = importlib.import_module("liger_kernel.transformers.experimental")
    return found | public(importlib.import_module("liger_kernel.chunked_loss")) | public(experimental)


def compare(name: str, theirs: inspect.Signature, mine: inspect.Signature, key: str = "") -> None:
    key = key or name
    wanted = [p for p in theirs.parameters.values() if p.name != "self"]
    got = [p for p in mine.parameters.values() if p.name != "self"]
    if not wanted and mine == inspect.signature(torch.nn.Module):
        got = []  # a module without an __init__ of its own
    assert [(p.name, p.kind) for p in got] == [(p.name, p.kind) for p in wanted], key
    family = "apply_liger_kernel_to_*" if name.startswith("apply_liger_kernel_to_") else ""
    for ours_is, theirs_is in zip(got, wanted, strict=True):
        if ours_is.default != theirs_is.default:
            known = {(key, ours_is.name), (family, ours_is.name)} & set(OTHER_DEFAULT)
            assert known, (key, ours_is.name, ours_is.default, theirs_is.default)
            USED.update(known)


def test_every_name_has_its_signature():
    found = names()
    assert len(found) > 120  # so that an empty listing does not pass
    for name, theirs in found.items():
        if name in ours.MISSING or name.endswith("OutputWithPast"):
            with pytest.raises(AttributeError, match=f"has no {name}: "):
                getattr(ours, name)
            continue
        mine = getattr(ours, name)
        if name == "AutoLigerKernelForCausalLM":
            for method in ("from_pretrained", "from_config"):
                compare(name, inspect.signature(getattr(theirs, method)), inspect.signature(getattr(mine, method)))
        elif inspect.isclass(theirs):
            compare(name, inspect.signature(theirs), inspect.signature(mine), f"{name}.__init__")
            if hasattr(theirs, "forward"):
                compare(name, inspect.signature(theirs.forward), inspect.signature(mine.forward), f"{name}.forward")
        else:
            compare(name, inspect.signature(theirs), inspect.signature(mine))


def test_the_functions_are_there():
    theirs = importlib.import_module("liger_kernel.transformers.functional")
    for name, function in public(theirs, own=True).items():
        if name not in ours.MISSING:
            compare(name, inspect.signature(function), inspect.signature(getattr(ours.functional, name)))
            assert getattr(ours.functional, name) is getattr(ours, name)


def test_the_chunked_functions_are_there():
    theirs = importlib.import_module("liger_kernel.chunked_loss.functional")
    applied = {name: value for name, value in vars(theirs).items() if name.startswith("liger_")}
    assert len(applied) == 8
    for name, apply in applied.items():
        forward = inspect.signature(apply.__self__.forward)  # its first argument is ctx: a classmethod has no cls
        wanted = forward.replace(parameters=list(forward.parameters.values())[1:])
        compare(name, wanted, inspect.signature(getattr(ours.chunked_loss, name)), f"chunked_loss.{name}")
    test_every_name_has_its_signature()
    assert set(OTHER_DEFAULT) == USED  # none that is not needed any more


def test_modules_have_the_same_parameters():
    """Weights of a checkpoint fit, and start as they do there, but for the biases that Liger draws at random."""
    theirs = importlib.import_module("liger_kernel.transformers")
    group_norm = importlib.import_module("liger_kernel.transformers.group_norm").LigerGroupNorm
    for name, arguments in {
        "LigerRMSNorm": (8,), "LigerRMSNormForMuseGlimmer": (8,), "LigerRMSNormForMuseGlimmerTextCentered": (8,),
        "LigerFusedAddRMSNorm": (8,), "LigerModulatedRMSNorm": (8,), "LigerLayerNorm": (8,), "LigerDyT": (8,),
        "LigerPolyNorm": (), "LigerGroupNorm": (8, 2), "LigerSoftmax": (), "LigerReLUSquared": (),
    }.items():  # fmt: skip
        there = (group_norm if name == "LigerGroupNorm" else getattr(theirs, name))(*arguments).state_dict()
        here = getattr(ours, name)(*arguments).state_dict()
        assert list(here) == list(there), name
        for key, value in there.items():
            torch.testing.assert_close(here[key], value, rtol=0, atol=0)


def test_what_is_missing_is_missing_there_too():
    """A name that Liger does not have (any more), or that is here, has no place in the list."""
    found = names() | public(importlib.import_module("liger_kernel.transformers.functional"))
    beside = {"LigerExpertParallelFusedMoe", "LigerORPOTrainer"}  # their modules cannot be imported everywhere
    assert set(ours.MISSING) - beside <= set(found)
    assert not set(ours.MISSING) & set(ours.__all__)
