"""PEFT's adapters on frozen layers of every kind: which are multiplied by hand, which by themselves, which are left."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
from peft.tuners.lora import aqlm, awq, gptq
from peft.tuners.lora import layer as lora_layer
from small_llama import batch, llama
from test_peft_fused import (
    ALL,
    adapted,
    assert_as_right,
    assert_same_loss,
    assert_same_step,
    checkpoint,
    gpt2,
    ran,
    rows_of,
    settled,
    step,
)

import tigon
from tigon.fusion.parts import lora_layers
from tigon.kernels.dispatch import meta_as_gpu


class Product(torch.autograd.Function):
    """A product that makes its own gradient of x, and reshapes inside, as kernels of int8 and int4 layers do."""

    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        y = x.reshape(-1, x.shape[-1]) @ (codes.to(x.dtype) * scale.to(x.dtype)).t()
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        codes, scale = ctx.saved_tensors
        return dy @ (codes.to(dy.dtype) * scale.to(dy.dtype)), None, None


class Int8(nn.Module):
    """A layer of int8 numbers with a forward of its own, and no weight in floats: as those of GPTQ, AWQ and HQQ."""

    calls = 0

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        Int8.calls += 1
        return Product.apply(x, self.qweight, self.scale)


class RowsOfInt8(Int8):
    """Reshapes outside: PEFT writes to the results of AQLM's layers."""

    def forward(self, x):
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


CLASSES = {
    "GPTQ": gptq.GPTQLoraLinear,
    "AWQ": awq.AwqLoraLinear,
    "AQLM": aqlm.AqlmLoraLinear,
    "PEFT's own for any layer": lora_layer.Linear,
}


def replaced(model, make):
    """The model with all linear layers of its blocks replaced."""
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(owner, name, make(child))
    return model.requires_grad_(False)


def quantised(kind=gptq.GPTQLoraLinear, dtype=torch.float32, device="cpu", make=Int8, pure=False, **options):
    torch.manual_seed(0)
    make = RowsOfInt8 if kind is aqlm.AqlmLoraLinear else make
    model = replaced(llama().to(dtype).to(device), make)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM", **options)
    config._register_custom_module({make: kind} if isinstance(make, type) else {})
    return settled(peft.get_peft_model(model, config, autocast_adapter_dtype=not pure)).train()


# -------------------------------------------------------------------------------------------------- layers' own forward


@pytest.mark.parametrize("kind", CLASSES)
def test_layers_that_multiply_by_themselves(kind, device):
    plain, model = (quantised(CLASSES[kind], device=device) for _ in range(2))
    fusion = tigon.fuse(model)
    base = "RowsOfInt8" if kind == "AQLM" else "Int8"
    assert rows_of(fusion) == {
        f"LoRA: {names}, beside the product of {base}": count
        for names, count in {
            "q_proj, k_proj, v_proj in one": 6, "o_proj": 2, "gate_proj, up_proj in one": 4, "down_proj": 2
        }.items()
    }  # fmt: skip
    assert not rows_of(fusion, fused=False)
    Int8.calls = 0
    got = step(model, batch(), device=device)
    assert ran(fusion) == Int8.calls == 14
    assert_same_step(got, step(plain, batch(), device=device))


@pytest.mark.parametrize("kind", ["AWQ", "AQLM"])
@pytest.mark.parametrize("mode", ["bf16 under autocast", "fp32 under autocast", "bf16, adapters in fp32", "bf16"])
def test_no_further_from_the_truth_than_peft(kind, mode, device):
    dtype = torch.float32 if mode.startswith("fp32") else torch.bfloat16
    plain, model, wide = (quantised(CLASSES[kind], dtype, device, pure=mode == "bf16") for _ in range(3))
    fusion = tigon.fuse(model)
    autocast = "autocast" in mode
    fused = step(model, batch(), autocast, device)
    assert ran(fusion) == 14
    assert_as_right(fused, step(plain, batch(), autocast, device), step(wide.float(), batch(), device=device))


def test_switching_adding_and_generating():
    plain, model = quantised(lora_layer.Linear), quantised(lora_layer.Linear)
    fusion = tigon.fuse(model)
    with model.disable_adapter(), plain.disable_adapter():
        assert_same_loss(plain, model)
        assert ran(fusion) == 0
    for m in (plain, model):
        torch.manual_seed(7)
        m.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        m.set_adapter("other")
    assert_same_loss(plain, model)
    assert ran(fusion) == 4
    ids = batch()["input_ids"][:, :5]
    texts = [m.eval().generate(input_ids=ids, max_new_tokens=8, do_sample=False) for m in (plain, model)]
    assert torch.equal(*texts)


def test_whole_and_quantised_layers_of_one_input(device):
    """As where a model keeps some of its layers whole."""

    def model():
        torch.manual_seed(0)
        base = llama().to(device)
        for layer in base.model.layers:
            layer.self_attn.k_proj = Int8(layer.self_attn.k_proj)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM")
        config._register_custom_module({Int8: gptq.GPTQLoraLinear})
        return settled(peft.get_peft_model(base.requires_grad_(False), config)).train()

    plain, fused = model(), model()
    fusion = tigon.fuse(fused)
    got = step(fused, batch(), device=device)
    assert ran(fusion) == 14
    assert_same_step(got, step(plain, batch(), device=device))


def test_transposed_weights(device):
    """GPT-2's Conv1D multiplies by itself."""
    options = {"targets": ["c_attn", "c_proj"], "fan_in_fan_out": True, "device": device}
    plain, model = (adapted(gpt2, **options) for _ in range(2))
    fusion = tigon.fuse(model)
    assert {what.partition(", beside")[2] for what in rows_of(fusion)} == {" the product of Conv1D"}
    got = step(model, batch(), device=device)
    assert ran(fusion) == 6
    assert_same_step(got, step(plain, batch(), device=device))


def test_classes_of_peft_that_are_not_known_are_left_and_named():
    class Twice(gptq.GPTQLoraLinear):
        """Computes something else, as a class of a later PEFT may."""

        __module__ = "peft.tuners.lora.later"

        def forward(self, x):
            return 2 * super().forward(x)

    plain, model = quantised(Twice), quantised(Twice)
    fusion = tigon.fuse(model)
    (row,) = rows_of(fusion, fused=False)
    assert "Twice" in row
    assert rows_of(fusion, fused=False)[row] == 14
    assert_same_loss(plain, model)
    assert ran(fusion) == 0


# ---------------------------------------------------------------- layers' own forward, and their dense weight backward


@pytest.fixture
def dense_backward(monkeypatch):
    """Int8 as the 8-bit layers of bitsandbytes."""
    monkeypatch.setitem(lora_layers.FRESH, lora_layers.qualify_name(Int8), True)
    weight = lambda base: lambda dtype: base.qweight.to(dtype) * base.scale.to(dtype)  # noqa: E731
    monkeypatch.setitem(lora_layers.WEIGHTS, lora_layers.qualify_name(Int8), weight)


LEVELS = [("none", None), ("product", None), ("cheap", None), ("cheap", True), ("mlp", None), ("mlp", False)]


@pytest.mark.parametrize("weight", ["none", "dense backward"])
@pytest.mark.parametrize(("recompute", "reentrant"), LEVELS)
def test_levels_and_checkpoints(recompute, reentrant, weight, backend, device, request):
    if weight == "dense backward":
        request.getfixturevalue("dense_backward")
        if reentrant:
            pytest.skip("a checkpoint of each kind once")
    plain, model = (quantised(device=device) for _ in range(2))
    if reentrant is not None:
        checkpoint(reentrant, plain, model)
    with tigon.use_backend("auto"):
        expected = step(plain, batch(rows=1, length=9), device=device)
    fusion = tigon.fuse(model, recompute=recompute)
    Int8.calls = 0
    got = step(model, batch(rows=1, length=9), device=device)
    assert ran(fusion) >= 14
    assert Int8.calls >= 14
    assert_same_step(got, expected)
    if reentrant is None:
        assert bool(fusion.report().tensors_not_kept) == (recompute in ("cheap", "mlp"))


# --------------------------------------------------------------------------------------------- what is done, counted


class Calls(TorchDispatchMode):
    """The shapes of products, and of tensors that are cast."""

    def __init__(self):
        super().__init__()
        self.products, self.casts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm"):
            self.products.append(tuple(out.shape))
        elif name == "_to_copy" and out.dtype != args[0].dtype:
            self.casts.append(tuple(out.shape))
        return out


def counted(model, autocast):
    with meta_as_gpu(), Calls() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ids = batch(length=21)["input_ids"].to("meta")
        model(input_ids=ids, labels=ids).loss.backward()
    return calls


@pytest.mark.usefixtures("codes_are_torchao_s")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("base", ["Linear", "Codes", "Int8"])
def test_frozen_weights_have_no_gradient_and_inputs_no_copies(base, autocast):
    """On the meta device, as on a GPU: on the CPU torch has no product of narrow factors with a wide result."""
    make = {"Int8": Int8, "Codes": coded(), "Linear": lambda linear: linear}[base]
    found = {}
    for side in ("plain", "fused"):
        model = quantised(dtype=torch.bfloat16, make=make, device="meta")
        if side == "fused":
            tigon.fuse(model, recompute="none")
        found[side] = counted(model, autocast)
        assert {n.partition("lora_")[1] for n, p in model.named_parameters() if p.grad is not None} == {"lora_"}
    # hidden 32, heads' 32 and 16, inner 64; 42 tokens.
    frozen = {(n, m) for n in (16, 32, 64) for m in (32, 64)}
    assert not frozen & set(found["fused"].products)
    inputs = {(*rows, m) for rows in ((2, 21), (42,)) for m in (16, 32, 64)}
    of_inputs = {side: [shape for shape in calls.casts if shape in inputs] for side, calls in found.items()}
    assert not of_inputs["fused"]
    assert len(of_inputs["plain"]) > 3 * 14, "PEFT makes copies, or this counts nothing"


# ------------------------------------------------------------------------------------------------------ tensor classes


class Codes(torch.Tensor):
    """A stand-in for torchao's weight-only int8, and with `act_quant_kwargs` for its product with rounded inputs.

    As torchao's: the product makes the weight dense, autograd then keeps it so, and rounded inputs have no gradient.
    """

    @staticmethod
    def __new__(cls, codes, scale, dtype, act_quant_kwargs=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype, act_quant_kwargs=None):
        self.codes, self.scale, self.act_quant_kwargs = codes, scale, act_quant_kwargs
        self.act_quant_scale = self.act_pre_scale = None

    def dequantize(self):
        return (self.codes * self.scale).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = args
            if weight.act_quant_kwargs is not None:
                x = (x.detach() * 4).round() / 4
            return nn.functional.linear(x, weight.dequantize(), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


def coded(act_quant_kwargs=None):
    def make(linear):
        weight = linear.weight.detach()
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        codes = Codes((weight / scale).round().to(torch.int8), scale, weight.dtype, act_quant_kwargs)
        linear.weight = nn.Parameter(codes, requires_grad=False)
        return linear

    return make


@pytest.fixture
def codes_are_torchao_s(monkeypatch):
    monkeypatch.setattr(
        lora_layers, "TENSOR_CLASSES", (*lora_layers.TENSOR_CLASSES, Codes.__module__.partition(".")[0])
    )
    monkeypatch.setitem(
        lora_layers.WEIGHT_ONLY, lora_layers.qualify_name(Codes), lora_layers.WEIGHT_ONLY["torchao.Int8Tensor"]
    )


@pytest.mark.usefixtures("codes_are_torchao_s")
@pytest.mark.parametrize("act_quant_kwargs", [None, object()])
def test_tensor_classes(act_quant_kwargs, device):
    """Weight-only ones are made dense for a product at a time; those that round inputs keep doing so."""
    plain, model = (quantised(make=coded(act_quant_kwargs), device=device) for _ in range(2))
    fusion = tigon.fuse(model)
    assert all(("beside the product of Codes" in what) == (act_quant_kwargs is not None) for what in rows_of(fusion))
    got = step(model, batch(), device=device)
    assert ran(fusion) == 14
    assert_same_step(got, step(plain, batch(), device=device))


@pytest.mark.usefixtures("codes_are_torchao_s")
def test_dense_weights_of_tensor_classes_are_not_kept():
    def kept(model):
        found = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t
        )
        with hooks:
            loss = model(**batch()).loss
        del loss
        return [t for t in found.values() if t.shape in ((64, 32), (32, 64)) and t.dtype == torch.float32]

    plain, model = (quantised(make=coded(), pure=True) for _ in range(2))
    tigon.fuse(model, parts=tigon.PARTS - {"head"})
    assert len(kept(plain)) >= 6, "nothing to save"
    assert not kept(model)


def test_tensor_classes_that_are_not_known_are_left_and_named():
    plain, model = (quantised(make=coded()) for _ in range(2))
    fusion = tigon.fuse(model)
    assert_same_loss(plain, model)
    assert ran(fusion) == 0
    assert "use a tensor class that Tigon does not support" in fusion.report().last_step()


# --------------------------------------------------------------------------------------------------- the libraries' own


def int8_of_bitsandbytes(linear):
    bnb = pytest.importorskip("bitsandbytes")
    device = linear.weight.device
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().cpu().half(), has_fp16_weights=False, requires_grad=False)
    return made.to(device)


def in_8_bits(dtype, device, checkpointed=False):
    torch.manual_seed(0)
    base = replaced(llama().to(dtype).to(device), int8_of_bitsandbytes)
    base.is_loaded_in_8bit = True
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM")
    model = settled(peft.get_peft_model(base, config)).train()
    if checkpointed:
        checkpoint(False, model)
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16 under autocast", "fp32 under autocast"])
def test_bitsandbytes_in_8_bits(mode, checkpointed, device):
    pytest.importorskip("bitsandbytes")
    dtype, autocast = getattr(torch, "float32" if mode.startswith("fp32") else "bfloat16"), "autocast" in mode
    plain, model = (in_8_bits(dtype, device, checkpointed) for _ in range(2))
    fusion = tigon.fuse(model)
    assert all("beside the product of Linear8bitLt" in what for what in rows_of(fusion))
    got, expected = (step(m, batch(), autocast, device) for m in (model, plain))
    assert ran(fusion) >= 14
    assert got[1].keys() == expected[1].keys()
    exact = mode == "fp32" and torch.device(device).type == "cpu"  # on a GPU the int8 product rounds x
    torch.testing.assert_close(got[0], expected[0], rtol=3e-6 if exact else 0.01, atol=0)
    for key, g in expected[1].items():
        assert (got[1][key] - g).norm() <= (1e-5 if exact else 0.06) * g.norm(), key


def test_bitsandbytes_in_4_bits_with_another_compute_dtype(device):
    """The layer then multiplies by itself: its own casts are its own business."""
    bnb = pytest.importorskip("bitsandbytes")

    def make(linear):
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        made.weight = bnb.nn.Params4bit(linear.weight.detach().cpu().clone(), requires_grad=False, quant_type="nf4")
        return made.to(device)

    def model():
        torch.manual_seed(0)
        base = replaced(llama().to(device), make)
        base.is_loaded_in_4bit = True
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM")
        return settled(peft.get_peft_model(base, config)).train()

    plain, fused = model(), model()
    fusion = tigon.fuse(fused)
    got, expected = step(fused, batch(), device=device), step(plain, batch(), device=device)
    assert ran(fusion) == 14
    assert_same_step(got, expected, tolerance=1e-2)


# ----------------------------------------------------------------------------------------------------------- bad input


def test_an_adapter_of_rank_0_is_named():
    model = adapted()
    fusion = tigon.fuse(model)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.lora_A["default"].weight = nn.Parameter(torch.empty(0, 64))
    layer.lora_B["default"].weight = nn.Parameter(torch.empty(32, 0))
    model(**batch())
    assert "its adapter has rank 0" in fusion.report().last_step()
    assert ran(fusion) == 13


@pytest.mark.parametrize("make", [None, Int8])
def test_an_adapter_on_another_device_is_named(make):
    model = adapted() if make is None else quantised()
    fusion = tigon.fuse(model)
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    for part in (layer.lora_A, layer.lora_B):
        part["default"].weight = nn.Parameter(part["default"].weight.detach().to("meta"))
    with contextlib.suppress(RuntimeError):
        model(**batch())
    assert "incompatible dtypes or devices" in fusion.report().last_step()
