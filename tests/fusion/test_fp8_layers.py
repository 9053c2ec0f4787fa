"""fuse(fp8=…): the layers that run in FP8, their gradients, and everything that must not change."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint

import tigon

pytest.importorskip("transformers")
import transformers as T
from fp8_recipe import Product
from torch import nn
from zoo import BASE, FAMILIES, batch, build

from tigon.fusion.fp8 import layers as fp8_layers

WHOLE = tigon.FP8(first=0)


@pytest.fixture(autouse=True)
def small_layers_pay():
    with fp8_layers.ignore_sizes():
        yield


def make(family="llama", dtype=torch.bfloat16, layers=3, seed=0):
    if family != "llama":
        return build(family).to(dtype)
    torch.manual_seed(seed)
    return T.LlamaForCausalLM(T.LlamaConfig(**BASE | {"num_hidden_layers": layers})).to(dtype)


def step(model, family="llama", **options):
    inputs = batch(family)
    model.zero_grad()
    loss = model(**inputs, **options).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def difference(gradients, truth):
    names = [n for n in truth if ".layers." in n]
    distance = sum((gradients[n].float() - truth[n].float()).square().sum() for n in names)
    return float((distance / sum(truth[n].float().square().sum() for n in names)).sqrt())


def rows(fusion, fused=True):
    return [row for row in fusion.report().rows if row.kind == "fp8" and row.fused == fused]


def test_which_layers_run_in_fp8():
    model = make()
    fusion = tigon.fuse(model, fp8=True)
    step(model)
    found = {row.what: (row.count, row.calls) for row in rows(fusion)}
    assert found == {
        "q_proj, k_proj, v_proj in one": (2, 2), "single layer": (2, 2), "gate and up in one, down": (2, 2),
    }  # fmt: skip
    (left,) = rows(fusion, fused=False)
    assert left.count == 1
    assert "first 1 decoder layers" in left.what


@pytest.mark.parametrize("fp8", [tigon.FP8(first=2), tigon.FP8(last=1)], ids=str)
def test_layers_at_the_ends_stay(fp8):
    fusion = tigon.fuse(make(), fp8=fp8)
    assert {row.count for row in rows(fusion)} == {3 - fp8.first - fp8.last}


def test_skipped_layers_stay():
    fusion = tigon.fuse(make(), fp8=tigon.FP8(first=0, skip=["o_proj", "layers.1.mlp"]))
    assert sorted((row.what, row.count) for row in rows(fusion)) == [
        ("gate and up in one, down", 2), ("q_proj, k_proj, v_proj in one", 3),
    ]  # fmt: skip


def compute_noise(prepare, dtype=torch.bfloat16, autocast=False):
    """The mean distance from the gradients in fp32, over random models: of one model it is off by a tenth by luck."""
    found = []
    for seed in range(6):
        _, truth = step(make(dtype=torch.float32, seed=seed))
        model = make(dtype=dtype, seed=seed)
        prepare(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(difference(step(model)[1], truth))
    return sum(found) / len(found)


def fuse_with(**options):
    return lambda model: tigon.fuse(model, fp8=tigon.FP8(**{"first": 0, **options}))


def emulate_layers(model):
    """Let the linear layers of a plain model multiply by the recipe."""

    def forward(module, is_wide, x):
        y = Product.apply(x.flatten(0, -2).double(), module.weight.double(), is_wide, "fp8")
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    for name, module in model.model.layers.named_modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(forward, module, name.endswith("down_proj"))


def test_gradients_are_as_good_as_the_recipe():
    ours = compute_noise(fuse_with())
    assert ours < 1.05 * compute_noise(emulate_layers)
    assert compute_noise(fuse_with(first=1)) < 0.9 * ours


@pytest.mark.parametrize("choice", [{"keep": "fp8"}, {"dw": "bf16"}, {"sums": "exact"}], ids=str)
def test_choices_stay_near(choice):
    assert compute_noise(fuse_with(**choice)) < 1.05 * compute_noise(fuse_with())


def test_the_head_on_request():
    models = make(), make()
    for model, head in zip(models, (False, True), strict=True):
        tigon.fuse(model, fp8=tigon.FP8(first=3, head=head))
    (loss, one), (fp8_loss, other) = (step(model) for model in models)
    assert loss != fp8_loss
    assert abs(loss - fp8_loss) < 0.01
    truth, found = one["lm_head.weight"].float(), other["lm_head.weight"].float()
    assert 0 < (found - truth).norm() < 0.05 * truth.norm()


def test_remove_restores_every_bit():
    model = make()
    before = step(model)
    with tigon.fuse(model, fp8=WHOLE):
        assert not torch.equal(step(model)[0], before[0])
    after = step(model)
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[1][n], g) for n, g in before[1].items())
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}),
        lambda m: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True}),
    ],
    ids=["checkpoint", "reentrant checkpoint"],
)
def test_the_same_bits_when_recomputed(change):
    models = make(), make()
    change(models[1])
    for model in models:
        model.train()
        tigon.fuse(model, fp8=WHOLE)
    (loss, kept), (again_loss, again) = (step(model) for model in models)
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(kept[n], again[n]) for n in kept)


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "olmo2", "deepseek_v3"])
def test_norms_that_other_code_reads_are_recomputed(family):
    models = make(family), make(family)
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in models:
        tigon.fuse(model, fp8=WHOLE)
    for _ in range(2):
        (loss, kept), (again_loss, again) = (step(model, family) for model in models)
        assert torch.equal(loss, again_loss)
        assert difference(again, kept) < 0.05  # norms before experts: their rows are made while checkpoints run alone


def test_a_reentrant_checkpoint_inside_a_layer_raises():
    model = make()
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.mlp.forward, use_reentrant=True)
    tigon.fuse(model, fp8=WHOLE)
    with pytest.raises(RuntimeError, match="fuse: a decoder layer hands the result of a norm in FP8 to a reentrant"):
        step(model)


def test_a_reader_without_gradients_does_not_cut_the_graph():
    models = make(), make()

    def read(module, args):
        with torch.no_grad():
            args[0].float().norm()

    for layer in models[1].model.layers:
        layer.mlp.register_forward_pre_hook(read)
    for model in models:
        tigon.fuse(model, fp8=tigon.FP8(first=0, skip=["mlp"]))
    (_, one), (_, other) = (step(model) for model in models)
    assert one.keys() == other.keys()
    assert difference(other, one) < 0.02


@pytest.mark.parametrize("options", [{"recompute": "mlp"}, {"recompute": "none"}, {"recompute": "cheap"}], ids=str)
def test_the_same_bits_at_every_level(options):
    models = make(), make()
    tigon.fuse(models[0], fp8=WHOLE)
    tigon.fuse(models[1], fp8=WHOLE, **options)
    (_, one), (_, other) = (step(model) for model in models)
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_copies_of_weights_kept_for_a_step_see_the_optimizer():
    models = make(), make()
    losses = []
    for model, weights in zip(models, ("use", "step"), strict=True):
        tigon.fuse(model, fp8=tigon.FP8(first=0, weights=weights))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for _ in range(3):
            found.append(step(model)[0])
            optimizer.step()
        losses.append(torch.stack(found))
    assert torch.equal(*losses)
    assert losses[0].unique().numel() == 3


@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batches_have_the_same_bits_whatever_is_kept(checkpointed):
    found, kept = {}, {}
    for weights in ("use", "step", "auto"):
        model = make()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tigon.fuse(model.train(), fp8=tigon.FP8(first=0, weights=weights))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for i in range(8):
            ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(i))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        found[weights] = torch.stack([*losses, *(p.detach().float().sum() for p in model.parameters())])
        kept[weights] = model.model.layers[1].mlp._tigon.fp8.stores.down.nbytes > 0
    assert torch.equal(found["use"], found["step"])
    assert torch.equal(found["use"], found["auto"])
    assert kept == {"use": False, "step": True, "auto": True}


def test_the_forward_pass_is_the_same_without_gradients():
    model = make()
    tigon.fuse(model, fp8=WHOLE)
    logits = [model(batch("llama")["input_ids"]).logits.detach()]
    with torch.no_grad():
        logits.append(model(batch("llama")["input_ids"]).logits)
    assert torch.equal(*logits)


def test_code_that_reads_a_norm_gets_the_tensor():
    models = make(), make()
    tigon.fuse(models[0], fp8=WHOLE)
    seen = []
    for layer in models[1].model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0] * 1.0))
    tigon.fuse(models[1], fp8=WHOLE)
    (loss, one), (hooked_loss, other) = (step(model) for model in models)
    assert torch.equal(loss, hooked_loss)
    assert len(seen) == 3
    assert all(type(x) is torch.Tensor for x in seen)
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_norm_that_other_code_wrote_into_is_read_as_written():
    def halve(x):
        x.mul_(0.5)

    models = make(), make()
    for model in models:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, args: halve(args[0]))
    with torch.no_grad():
        expected = models[0](batch("llama")["input_ids"]).logits
    tigon.fuse(models[1], fp8=WHOLE)
    with torch.no_grad():
        found = models[1](batch("llama")["input_ids"]).logits
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_a_norm_whose_rows_nobody_multiplies_is_computed_once():
    model = make()
    for layer in model.model.layers:  # the unit reads the tensor, and the layers in the unit run in bf16
        layer.mlp.gate_proj.register_forward_hook(lambda *_: None)
    fusion = tigon.fuse(model, fp8=WHOLE)
    step(model)
    step(model)
    state = model.model.layers[1].post_attention_layernorm._tigon.fp8
    assert not state.is_read
    assert "ran 0" in str(fusion.report()) or any(row.idle for row in rows(fusion))


def test_few_tokens_run_in_bf16(monkeypatch):
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    models = make(), make()
    tigon.fuse(models[0])
    fusion = tigon.fuse(models[1], fp8=WHOLE)
    (loss, one), (fp8_loss, other) = (step(model) for model in models)
    assert torch.equal(loss, fp8_loss)
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert all("tokens, too few for FP8 to pay" in row.idle for row in rows(fusion))


def test_layers_with_fewer_weights_need_more_tokens(monkeypatch):
    """Below, the host launches slower than products in bf16 run; a graph launches without the host."""
    with torch.device("meta"):
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "num_attention_heads": 32}
        small = T.LlamaForCausalLM(T.LlamaConfig(**BASE | sizes | {"num_key_value_heads": 8, "num_hidden_layers": 1}))
    assert 9_000 < fp8_layers.count_least_tokens(small.model.layers) < 11_000
    layer = nn.ModuleDict({"linear": nn.Linear(1000, 600), "convolution": nn.Conv1d(8, 8, 4)})
    layer["linear"].weight.data = torch.empty(0)  # as ZeRO-3 leaves a partitioned parameter
    assert fp8_layers.count_least_tokens([layer]) == 1_000_000
    layer.stack = nn.Parameter(torch.empty(4, 32, 16))
    assert fp8_layers.count_least_tokens([layer]) == 0
    model = make()
    fusion = tigon.fuse(model, fp8=WHOLE)
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    monkeypatch.setattr(fp8_layers, "LEAST_TOKENS", 1)
    fusion._ledger.fp8_least_tokens = batch("llama")["input_ids"].numel()
    step(model)
    assert all(row.calls for row in rows(fusion))
    fusion._ledger.fp8_least_tokens += 1
    step(model)
    assert not any(row.calls for row in rows(fusion))


def test_small_products_stay(monkeypatch):
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    fusion = tigon.fuse(make(), fp8=WHOLE)
    assert not rows(fusion)
    assert all("too small" in row.what for row in rows(fusion, fused=False))


def test_autocast_with_fp32_weights():
    model = make(dtype=torch.float32)
    fusion = tigon.fuse(model, fp8=WHOLE)
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = step(model)
    assert all(row.calls == row.count for row in rows(fusion))
    assert all(g.dtype == torch.float32 for g in gradients.values())
    assert compute_noise(fuse_with(), torch.float32, autocast=True) < 1.05 * compute_noise(emulate_layers)


def test_fp32_without_autocast_stays():
    model = make(dtype=torch.float32)
    fusion = tigon.fuse(model, fp8=WHOLE)
    step(model)
    assert all(not row.calls and "float32" in row.idle for row in rows(fusion))


def test_frozen_weights_get_no_gradient():
    model = make()
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    whole = make()
    for m in (model, whole):
        tigon.fuse(m, fp8=WHOLE)
    (_, frozen), (_, every) = step(model), step(whole)
    assert frozen.keys() == {"model.embed_tokens.weight"}
    assert torch.equal(frozen["model.embed_tokens.weight"], every["model.embed_tokens.weight"])


def test_a_copied_model_runs_on_its_own_weights():
    model = make()
    tigon.fuse(model, fp8=tigon.FP8(first=0, weights="step"))
    before = step(model)[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.model.layers.parameters():
            p.mul_(1.5)
    assert not torch.equal(step(twin)[0], before)
    assert torch.equal(step(model)[0], before)


def test_nothing_keeps_the_model():
    model = make()
    tigon.fuse(model, fp8=tigon.FP8(first=0, weights="step"))
    step(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_nan_reaches_the_loss():
    model = make()
    tigon.fuse(model, fp8=WHOLE)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    assert step(model)[0].isnan()


RUN = [name for name in FAMILIES if name not in ("llava", "qwen2_5_vl", "gpt2")]


@pytest.mark.parametrize("family", RUN)
def test_families(family):
    """Every family trains, its loss is near the loss in bf16, and layers run where the report says so."""
    plain, model = make(family), make(family)
    loss, _ = step(plain, family)
    fusion = tigon.fuse(model, fp8=WHOLE)
    ours, gradients = step(model, family)
    assert abs(float(ours - loss)) < 0.05 * float(loss)
    assert all(g.isfinite().all() for g in gradients.values())
    assert list(rows(fusion)) or rows(fusion, fused=False)
    assert all(row.calls or row.idle for row in rows(fusion))
    fusion.remove()
    assert torch.equal(step(model, family)[0], loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tigon.FP8(first=-1), "FP8: first must be an integer of at least 0, got -1"),
        (lambda: tigon.FP8(keep="int8"), "FP8: keep must be one of .*got 'int8'"),
        (lambda: tigon.FP8(weights="never"), "FP8: weights must be one of"),
        (lambda: tigon.FP8(skip="lm_head"), "FP8: skip must be names of layers, got 'lm_head'"),
        (lambda: tigon.fuse(nn.Linear(2, 2), fp8="yes"), "fuse: fp8 must be True, False or a tigon.FP8, got 'yes'"),
    ],
)
def test_bad_options_get_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_without_layers_says_so():
    fusion = tigon.fuse(nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)), fp8=WHOLE)
    (row,) = rows(fusion, fused=False)
    assert "no list of layers" in row.what


class Quantised(nn.Linear):
    """As libraries quantise layers: a subclass, whose weight is no longer what a Linear has."""


def quantise(layer):
    layer.__class__ = Quantised


def narrow(layer):
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"), [(quantise, "a subclass of torch.nn.Linear"), (narrow, "its weight is float8_e4m3fn")]
)
def test_quantised_layers_stay_and_the_report_says_so(change, reason):
    model = make()
    change(model.model.layers[1].self_attn.o_proj)
    fusion = tigon.fuse(model, fp8=WHOLE)
    assert [row.count for row in rows(fusion, fused=False) if reason in row.what] == [1]
    assert sum(row.count for row in rows(fusion)) == 3 * len(model.model.layers) - 1


def subclass(layer):
    layer._parameters["weight"] = torch.Tensor._make_subclass(type("Other", (nn.Parameter,), {}), layer.weight.data)


def move(layer):
    layer.to("meta")
    layer.forward = lambda x: x  # the plain layer would raise


@pytest.mark.parametrize("change", [subclass, move])
def test_a_layer_whose_weight_changes_its_kind_runs_in_bf16(change):
    model = make()
    fusion = tigon.fuse(model, fp8=WHOLE)
    layer = model.model.layers[1].self_attn.o_proj
    change(layer)
    step(model)
    (row,) = [row for row in rows(fusion) if row.name == "Linear"]
    assert row.calls == row.count - 1
    if change is subclass:
        assert "no plain tensor on the input's device" in row.idle


def test_a_batch_without_tokens_gives_zeros():
    model = make()
    fusion = tigon.fuse(model, fp8=WHOLE)
    x = torch.zeros(0, 5, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    y = model.model.layers[1].mlp(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    for layer in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.down_proj):
        assert not layer.weight.grad.any()
    assert fusion


# ----------------------------------------------------------------------------------------------------------- experts


def find_experts(fusion):
    return [(row.fused, row.count, row.calls) for row in rows(fusion) + rows(fusion, False) if "xperts" in row.name]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_run_in_fp8_where_they_are_asked_for(family):
    model = build(family).bfloat16()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    _, truth = step(model.float(), family)
    truth = {n: p for n, p in truth.items() if "experts" in n}
    model.bfloat16()
    errors = []
    for experts in (False, True):
        with tigon.fuse(model, fp8=tigon.FP8(first=0, experts=experts, skip=["attn"])) as fusion:
            _, gradients = step(model, family)
            assert find_experts(fusion) == ([(True, 2, 2)] if experts else [])
        assert gradients.keys() >= truth.keys()
        errors.append(difference(gradients, truth))
    assert 1.5 * errors[0] < errors[1] < 0.4
    assert all(torch.equal(p.float(), before[n].float()) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("gpt_oss", {}, "no plain gated unit"),
        ("mixtral", {"dw": "bf16"}, "in FP8 throughout"),
    ],
)
def test_experts_that_stay_say_why(family, options, why):
    fusion = tigon.fuse(build(family).bfloat16(), fp8=tigon.FP8(first=0, experts=True, **options))
    found = [row.what for row in rows(fusion, False) if "xperts" in row.name]
    assert len(found) == 1
    assert why in found[0]


def test_small_experts_stay(monkeypatch):
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    fusion = tigon.fuse(build("mixtral").bfloat16(), fp8=tigon.FP8(first=0, experts=True))
    assert [row.count for row in rows(fusion, False) if "too small" in row.what and "xperts" in row.name] == [2]


def test_experts_fall_back_for_few_tokens(monkeypatch):
    model = build("mixtral").bfloat16()
    fusion = tigon.fuse(model, fp8=tigon.FP8(first=0, experts=True))
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    step(model, "mixtral")
    assert find_experts(fusion) == [(True, 2, 0)]
    assert "too few for FP8 to pay" in str(fusion.report())
