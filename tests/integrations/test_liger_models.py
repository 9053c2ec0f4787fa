"""apply_liger_kernel_to_* and AutoLigerKernelForCausalLM: one instance is fused, by Liger's flags, and nothing else."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tigon
from tigon.install import install
from tigon.integrations import liger
from tigon.integrations.liger import models

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EVERYTHING = {"head", "norm", "mlp", "rotary"}


def model(kind="Llama", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch():
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def step(of):
    of.zero_grad()
    loss = of(**batch()).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in of.parameters())]


def kinds(fusion):
    return {row.kind for row in fusion.report().fused_rows} & EVERYTHING


def process():
    """Everything that Liger replaces for the process: functions, classes, their methods, tables of losses."""
    from transformers.loss import loss_utils
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    places = [torch.nn.functional, modeling_llama, modeling_gemma, loss_utils]
    places += [value for module in places[1:] for value in vars(module).values() if inspect.isclass(value)]
    found = {(id(place), name): value for place in places for name, value in vars(place).items()}
    return found | {("losses", name): value for name, value in loss_utils.LOSS_MAPPING.items()}


# ----------------------------------------------------------------------------------------------------- one instance


@pytest.mark.parametrize("kind", ["Gemma"])
def test_an_instance_is_fused_and_nothing_else(kind):
    one, other = model(kind), model(kind)
    expected = step(other)
    before = process()  # now: transformers itself keeps things on its classes when a model is first built
    fusion = getattr(liger, f"apply_liger_kernel_to_{kind.lower()}")(model=one)
    assert kinds(fusion) == EVERYTHING
    assert "forward" not in vars(other)
    assert not [m for m in other.modules() if "forward" in vars(m)]
    torch.testing.assert_close(step(one), expected, rtol=1e-4, atol=1e-5)
    calls = fusion.report().calls
    assert all(calls[kind] for kind in EVERYTHING)
    after = process()
    assert after.keys() == before.keys()
    assert all(after[key] is value for key, value in before.items())
    fusion.remove()
    torch.testing.assert_close(step(one), expected, rtol=0, atol=0)


FLAGS = {
    "all": ({}, EVERYTHING),
    "no rope": ({"rope": False}, EVERYTHING - {"rotary"}),
    "no rms_norm": ({"rms_norm": False}, EVERYTHING - {"norm"}),
    "no swiglu": ({"swiglu": False}, EVERYTHING - {"mlp"}),
    "no loss": ({"fused_linear_cross_entropy": False}, EVERYTHING - {"head"}),
    "the loss by its other flag": ({"cross_entropy": True, "fused_linear_cross_entropy": False}, EVERYTHING),
    "the loss by both": ({"cross_entropy": True}, EVERYTHING),
    "rope alone": ({"rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": False}, {"rotary"}),
}


@pytest.mark.parametrize(("flags", "expected"), FLAGS.values(), ids=FLAGS.keys())
def test_flags(flags, expected):
    assert kinds(liger.apply_liger_kernel_to_llama(model=model(), **flags)) == expected
    assert kinds(liger._apply_liger_kernel_to_instance(model(), **flags)) == expected


def test_flags_by_position():
    assert kinds(liger.apply_liger_kernel_to_llama(False, False, True, False, True, model())) == {"head", "mlp"}


def test_flags_of_another_family_are_left_out():
    """As Liger leaves them out of what liger_kernel_config holds."""
    one = model("Gemma")
    assert kinds(liger._apply_liger_kernel_to_instance(one, swiglu=False, rope=False)) == EVERYTHING - {"rotary"}
    assert kinds(liger._apply_liger_kernel_to_instance(model("Gemma"), geglu=False)) == EVERYTHING - {"mlp"}


def test_any_type_of_model_is_fused():
    """Liger does nothing for those that it has no function for."""
    one = model("StableLm", partial_rotary_factor=0.5)
    assert one.config.model_type not in models.ARGUMENTS
    assert "head" in kinds(liger._apply_liger_kernel_to_instance(one, rope=False))


def test_norms_have_one_flag():
    """Of functions that have two: what is said goes for both."""
    norms = liger.apply_liger_kernel_to_gemma3(model=model("Gemma"), rms_norm=False)
    assert kinds(norms) == EVERYTHING - {"norm"}
    with pytest.raises(ValueError, match=r"rms_norm and layer_norm must be both on .*, got rms_norm=False and layer_n"):
        liger.apply_liger_kernel_to_gemma3(model=model("Gemma"), rms_norm=False, layer_norm=True)


def test_experts_go_with_swiglu():
    one = model("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert "experts" in {row.kind for row in liger.apply_liger_kernel_to_mixtral(model=one).report().fused_rows}
    one = model("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    fusion = liger.apply_liger_kernel_to_mixtral(model=one, swiglu=False)
    assert not {"experts", "mlp"} & {row.kind for row in fusion.report().fused_rows}


def test_every_part_of_fuse_has_a_flag():
    """So that what Liger can switch off does not stay on under another name."""
    # Which Liger leaves to PEFT, or has nothing for.
    parts = tigon.PARTS - {"adapters", "expert_adapters", "linear", "fp8_base", "documents"}
    parts -= {"conv", "recurrence", "images", "patches"}
    parts -= {"add_norm", "qk_norm"}  # which norm switches off with itself
    assert parts == {part for targets in models.FLAGS.values() for part in targets}


# ---------------------------------------------------------------------------------------------------- the process


def test_without_a_model_there_is_a_sentence():
    for family in models.ARGUMENTS:
        name = f"apply_liger_kernel_to_{family}"
        with pytest.raises(ValueError, match=rf"{name}: model must be given, .* or call tigon.fuse\(model\)"):
            getattr(liger, name)()


def test_patching_by_type_is_refused():
    with pytest.raises(ValueError, match="_apply_liger_kernel: model must be given"):
        liger._apply_liger_kernel("llama", rope=True)


def test_unknown_flags_are_named():
    with pytest.raises(TypeError, match="rms"):
        liger.apply_liger_kernel_to_llama(rms=True, model=model())
    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llava: its flags are rope, .*, got 'vision'"):
        liger.apply_liger_kernel_to_llava(vision=True, model=model())
    with pytest.warns(UserWarning, match=r"'rms' is not one of the flags rope, .* and is ignored"):
        assert kinds(liger._apply_liger_kernel_to_instance(model(), rms=True)) == EVERYTHING


def test_the_types_with_a_function_are_ligers():
    theirs = pytest.importorskip("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    ours = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert {kind: fn.__name__ for kind, fn in theirs.items()}.items() <= {
        k: f.__name__ for k, f in ours.items()
    }.items()
    assert kinds(ours["llama"](model=model())) == EVERYTHING


# --------------------------------------------------------------------------------------------------------- calls


def test_a_second_call_adds_to_the_first():
    one = model()
    everything_off = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
    assert kinds(liger.apply_liger_kernel_to_llama(model=one, **everything_off)) == set()
    assert kinds(liger.apply_liger_kernel_to_llama(model=one, **everything_off | {"swiglu": True})) == {"mlp"}
    second = liger.apply_liger_kernel_to_llama(model=one, **everything_off | {"rope": True})
    assert kinds(second) == {"mlp", "rotary"}
    assert liger.apply_liger_kernel_to_llama(model=one, swiglu=False, rope=False, rms_norm=False).report().fused_rows
    second.remove()
    assert "head" in kinds(liger.apply_liger_kernel_to_llama(model=one))


@pytest.mark.parametrize(
    "asked",
    [
        {"lse_square_scale": 0.1}, {"label_smoothing": 0.5}, {"use_token_scaling": True},
        {"accum_dtype": torch.float32},
        {"return_token_accuracy": True}, {"return_predicted_tokens": True}, {"ce_weight": torch.ones(131)},
    ],
)  # fmt: skip
def test_arguments_of_ligers_forward_are_refused_by_name(asked):
    """Dropped in silence they would turn one training into another."""
    one, ids = model(), torch.arange(1, 9)[None]
    liger.apply_liger_kernel_to_llama(model=one)
    (name,) = asked
    for fused in (one, copy.deepcopy(one)):
        with pytest.raises(ValueError, match=f"must not be given {name}="):
            fused(ids, labels=ids, **asked)
    one(ids, labels=ids, lse_square_scale=0.0, return_token_accuracy=False, label_smoothing=None)


def test_skip_logits():
    one, ids = model(), torch.arange(1, 9)[None]
    liger.apply_liger_kernel_to_llama(model=one)
    with pytest.raises(ValueError, match="skip_logits is True, but labels and shift_labels are None"):
        one(ids, skip_logits=True)
    loss = one(ids, labels=ids, skip_logits=True).loss
    outputs = one(ids, labels=ids, skip_logits=False)
    assert torch.equal(outputs.loss, loss)
    assert outputs.logits.sum().isfinite()


# ------------------------------------------------------------------------------------------------------ auto class


def test_auto_from_config():
    torch.manual_seed(0)
    one = liger.AutoLigerKernelForCausalLM.from_config(transformers.LlamaConfig(**SIZES), rope=False)
    assert kinds(one._tigon_fusion) == EVERYTHING - {"rotary"}
    assert type(one) is transformers.LlamaForCausalLM


def test_auto_from_pretrained(tmp_path):
    plain = model()
    plain.save_pretrained(tmp_path)
    one = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, swiglu=False, dtype=torch.float32)
    assert kinds(one._tigon_fusion) == EVERYTHING - {"mlp"}
    torch.testing.assert_close(step(one), step(plain), rtol=1e-4, atol=1e-5)
    one, info = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert kinds(one._tigon_fusion) == EVERYTHING
    assert not info["missing_keys"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "_tigon_fusion" not in vars(again)


def test_auto_takes_its_flags_out(tmp_path):
    """What is not a flag reaches transformers, and what transformers does not know is its to refuse."""
    model().save_pretrained(tmp_path)
    one = liger.AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, rope=False, num_hidden_layers=1, dtype=torch.bfloat16
    )
    assert one.config.num_hidden_layers == 1
    assert one.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="ropes"):
        liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, ropes=False)


# ----------------------------------------------------------------------------------------------------------- names


def test_names_are_imported_without_liger_and_without_transformers():
    code = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("liger_kernel", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
from tigon.integrations import liger
assert "tigon.integrations.liger.cross_entropy" not in sys.modules
for name in liger.__all__:
    if name != "AutoLigerKernelForCausalLM":
        getattr(liger, name)
assert not {"liger_kernel", "transformers"} & set(sys.modules)
try:
    liger.AutoLigerKernelForCausalLM
except ImportError as error:
    print(error)
"""
    source = str(Path(liger.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"AutoLigerKernelForCausalLM needs transformers: {install('hf')}."


def test_what_is_missing_says_so():
    for name in liger.MISSING:
        with pytest.raises(AttributeError, match=rf"tigon.integrations.liger has no {name}: .+\."):
            getattr(liger, name)
        with pytest.raises(ImportError, match="cannot import name"):
            exec(f"from tigon.integrations.liger import {name}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'tigon\.integrations\.liger' has no attribute 'LigerTypo'"):
        _ = liger.LigerTypo
    with pytest.raises(
        AttributeError, match=r"tigon.integrations.liger.functional has no liger_mhc_pre: Tigon has no kernel"
    ):
        _ = liger.functional.liger_mhc_pre
    assert set(liger.__all__) <= set(dir(liger))
