"""fuse(fp8=…) on models with LoRA adapters: frozen layers in FP8, PEFT's events, released weights, and what stays."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint

import tigon

pytest.importorskip("peft")
pytest.importorskip("transformers")
import peft
import transformers as T
from fp8_recipe import Product
from test_fp8_layers import rows, small_layers_pay  # noqa: F401 (a fixture)
from torch import nn
from zoo import BASE

from tigon.fusion.fp8 import layers as fp8_layers
from tigon.ops.fp8 import frozen
from tigon.ops.fp8.frozen import ReplacedWeight

KEEP, RELEASE = tigon.FP8(first=0), tigon.FP8(first=0, base="release")
IDS = torch.randint(0, BASE["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def settle(model):
    for name, p in sorted(model.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            p.data.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "lora_A" in name else 0.05))
    return model


def make(targets=ALL, layers=2, seed=0, **options):
    torch.manual_seed(seed)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE | {"num_hidden_layers": layers})).to(torch.bfloat16)
    return settle(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **options))).train()


def step(model, autocast=True):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    return torch.equal(one[0], other[0]) and one[1].keys() == other[1].keys() and all(
        torch.equal(g, other[1][n]) for n, g in one[1].items()
    )  # fmt: skip


def difference(found, truth):
    away = sum((found[1][n].float() - g.float()).square().sum() for n, g in truth[1].items())
    return float((away / sum(g.float().square().sum() for g in truth[1].values())).sqrt())


def bases(model):
    return {name: m for name, m in model.named_modules() if name.endswith("base_layer")}


def round_bases(model):
    """The model with its frozen weights as rounded to FP8."""
    tigon.fuse(model, fp8=RELEASE).remove()
    return model


# ------------------------------------------------------------------------------------------------------------ numbers


def test_every_layer_with_an_adapter_is_reported_and_counted():
    model = make()
    fusion = tigon.fuse(model, fp8=True)
    step(model)
    found = {row.what: (row.count, row.calls) for row in rows(fusion)}
    assert found == {
        "q_proj, k_proj, v_proj: frozen under adapters": (3, 3), "o_proj: frozen under adapters": (1, 1),
        "gate_proj, up_proj: frozen under adapters": (2, 2), "down_proj: frozen under adapters": (1, 1),
    }  # fmt: skip
    (left,) = rows(fusion, fused=False)
    assert "first 1 decoder layers" in left.what


@pytest.mark.parametrize("fp8", [KEEP, RELEASE], ids=["keep", "release"])
def test_layers_with_one_input_share_their_products(fp8, monkeypatch):
    """Forward a product for each layer; backward one for q, k, v, one for gate and up, one each for o and down."""
    model = make()
    tigon.fuse(model, fp8=fp8)
    step(model)
    calls = []
    multiply = frozen.multiply_rows
    monkeypatch.setattr(frozen, "multiply_rows", lambda *args, **kw: (calls.append(args), multiply(*args, **kw))[1])
    step(model)
    assert len(calls) == 2 * (7 + 4) - 1  # the embedding needs no gradient
    x = {id(rows.data) for rows, _ in calls[:3]}
    assert len(x) == 1


def test_gradients_are_as_good_as_the_recipe():
    def emulate(model):
        def forward(module, x):
            x = x.to(torch.bfloat16)
            y = Product.apply(x.flatten(0, -2).double(), module.weight.double(), False, "fp8")
            return y.to(x.dtype).view(*x.shape[:-1], -1)

        for module in bases(model).values():
            module.forward = functools.partial(forward, module)

    noise = []
    for prepare in (emulate, lambda model: tigon.fuse(model, fp8=KEEP)):
        found = []
        for seed in range(4):
            truth = step(make(seed=seed))
            model = make(seed=seed)
            prepare(model)
            found.append(difference(step(model), truth))
        noise.append(sum(found) / len(found))
    assert 0.01 < noise[1] < 1.1 * noise[0]


@pytest.mark.parametrize(
    "options", [{}, {"lora_dropout": 0.2}, {"targets": ["q_proj", "v_proj"]}, {"targets": ["gate_proj", "o_proj"]}]
)
def test_released_weights_give_the_same_bits(options):
    found = []
    for fp8 in (KEEP, RELEASE):
        model = make(**options)
        tigon.fuse(model, fp8=fp8)
        torch.manual_seed(5)
        found.append(step(model))
    assert same(*found)
    assert found[0][1]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("level", ["cheap", "mlp"])
def test_checkpoints_give_the_same_bits(reentrant, level):
    found = []
    for way in ("plain", reentrant):
        model = make(lora_dropout=0.1)
        if way not in ("plain", None):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way})
            model.enable_input_require_grads()
        tigon.fuse(model, fp8=KEEP, recompute="none" if way == "plain" else level)
        torch.manual_seed(5)
        found.append(step(model))
    assert same(*found)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_and_bases_of_both_dtypes(autocast, dtype):
    if dtype == torch.float32 and not autocast:
        pytest.skip("FP8 products give bf16")
    model = make().to(dtype)
    truth = step(model, autocast)
    fusion = tigon.fuse(model, fp8=KEEP)
    found = step(model, autocast)
    assert all(row.calls == row.count for row in rows(fusion))
    assert 0.01 < difference(found, truth) < 0.15


def test_nothing_more_is_kept_for_the_backward_pass():
    kept = []
    for fp8 in (False, KEEP, RELEASE):
        model = make()
        tigon.fuse(model, fp8=fp8)
        step(model)
        held = {}

        def pack(t, held=held):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS, labels=IDS)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for at, size in held.items() if at not in weights))
    assert kept[1] <= kept[0]
    assert kept[2] <= kept[0]


def test_the_norm_in_front_of_adapters_stays_a_tensor():
    model = make(["q_proj"])
    tigon.fuse(model, fp8=KEEP)
    assert not any(
        isinstance(vars(m).get("_tigon").fp8, fp8_layers.FP8Norm) for m in model.modules() if "_tigon" in vars(m)
    )


# ------------------------------------------------------------------------------------------------------- PEFT's events


def add(model):
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=ALL))
    settle(model)


def merge_one_layer(model):
    next(m for n, m in model.named_modules() if n.endswith("0.self_attn.k_proj")).merge()


EVENTS = {
    "merge": lambda m: m.merge_adapter(),
    "merge safely": lambda m: m.merge_adapter(safe_merge=True),
    "merge and unmerge": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "merge one layer": merge_one_layer,
    "merge, step, unmerge": lambda m: (m.merge_adapter(), step(m), m.unmerge_adapter()),
    "merge and unload": lambda m: m.merge_and_unload(),
    "unload": lambda m: m.unload(),
    "add": add,
    "add and switch": lambda m: (add(m), m.set_adapter("second")),
    "add, switch and delete": lambda m: (add(m), m.set_adapter("second"), m.delete_adapter("default")),
    "several active": lambda m: (add(m), m.base_model.set_adapter(["default", "second"])),
    "disable": lambda m: m.base_model.disable_adapter_layers(),
    "disable and enable": lambda m: (m.base_model.disable_adapter_layers(), m.base_model.enable_adapter_layers()),
}


@pytest.mark.parametrize("fp8", [KEEP, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("event", EVENTS)
def test_after_an_event_the_layers_are_as_fused_then(event, fp8):
    """A model fused before the event, beside a model to which it happened unfused."""
    ours, plain = make(layers=1), make(layers=1)
    if fp8 is RELEASE:
        round_bases(plain)
    tigon.fuse(ours, fp8=fp8)
    step(ours)  # copies are made
    torch.manual_seed(2)
    one = EVENTS[event](ours)
    torch.manual_seed(2)
    other = EVENTS[event](plain)
    is_model = isinstance(one, nn.Module)
    ours, plain = (one, other) if is_model else (ours, plain)
    # Layers that PEFT's own code runs, or that have lost their adapters, are in bf16 in a model that was fused before.
    is_bf16 = event in ("merge", "merge safely", "merge and unload", "unload", "several active", "disable")
    tigon.fuse(plain, fp8=False if is_bf16 else KEEP)
    assert same(step(ours), step(plain))


@pytest.mark.parametrize("fp8", [KEEP, RELEASE], ids=["keep", "release"])
def test_merged_weights_hold_the_adapters(fp8):
    model, plain = make(layers=1), make(layers=1)
    if fp8 is RELEASE:
        round_bases(plain)
    fusion = tigon.fuse(model, fp8=fp8)
    step(model)
    merged, wanted = model.merge_and_unload(), plain.merge_and_unload()
    fusion.remove()
    found = merged.state_dict()
    assert all(torch.equal(found[name], t) for name, t in wanted.state_dict().items())


def test_adapters_added_behind_fp8_layers_are_never_stale():
    torch.manual_seed(0)
    model = (
        T.LlamaForCausalLM(T.LlamaConfig(**BASE | {"num_hidden_layers": 1})).to(torch.bfloat16).requires_grad_(False)
    )
    tigon.fuse(model, fp8=KEEP)
    model(input_ids=IDS, labels=IDS)
    model = settle(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ALL)))
    before = step(model)
    assert before[1]
    model.merge_adapter()
    merged = step(model)
    assert not torch.equal(merged[0], before[0])
    truth = make(layers=1)
    truth.merge_adapter()
    assert abs(merged[0] - step(truth)[0]) < 2e-3


@pytest.mark.parametrize("is_frozen", [False, True])
def test_copies_of_layers_without_adapters_do_not_outlive_a_merge(is_frozen):
    """A merge gives weights no new version: PEFT freezes trained weights, and frozen ones drop copies in a call."""
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**BASE | {"num_hidden_layers": 1})).to(torch.bfloat16).eval()
    model.requires_grad_(not is_frozen)
    tigon.fuse(model, fp8=tigon.FP8(first=0, weights="step"))
    with torch.no_grad():
        model(input_ids=IDS)
        adapted = settle(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ALL))).eval()
        if is_frozen:
            adapted(input_ids=IDS)
        merged = adapted.merge_and_unload()
        found = merged(input_ids=IDS).logits.float()
        plain = T.LlamaForCausalLM(merged.config).to(torch.bfloat16).eval()
        plain.load_state_dict(merged.state_dict())
        truth = plain(input_ids=IDS).logits.float()
    assert (found - truth).norm() < 0.15 * truth.norm()


def test_weights_of_unloaded_layers_come_back():
    model = make()
    fusion = tigon.fuse(model, fp8=RELEASE)
    model = model.unload()
    gc.collect()
    assert any(isinstance(p, ReplacedWeight) for p in model.parameters())
    fusion.remove()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    wanted = round_bases(make()).unload().state_dict()
    assert all(torch.equal(t, wanted[name]) for name, t in model.state_dict().items())


def test_a_layer_whose_adapter_is_a_variant_stays():
    model = make(use_dora=True)
    fusion = tigon.fuse(model, fp8=RELEASE)
    step(model)
    assert not rows(fusion)
    assert {row.what for row in rows(fusion, fused=False)} == {
        "its adapter is a LoRA variant (DoRA, aLoRA and the like)"
    }


def test_a_trained_base_stays():
    model = make()
    name, layer = next(iter(bases(model).items()))
    layer.weight.requires_grad_()
    fusion = tigon.fuse(model, fp8=RELEASE)
    found = step(model)
    assert found[1][f"{name}.weight"].norm() > 0
    (left,) = rows(fusion, fused=False)
    assert (left.what, left.count) == ("its base layer's weight is trained", 1)


def test_a_base_that_is_trained_later_stays():
    model = make(layers=1)
    tigon.fuse(model, fp8=KEEP)
    step(model)
    name, layer = next(iter(bases(model).items()))
    layer.weight.requires_grad_()
    assert step(model)[1][f"{name}.weight"].norm() > 0


def test_a_weight_that_is_written_is_quantised_again():
    model = make(layers=1)
    tigon.fuse(model, fp8=KEEP)
    first = step(model)
    with torch.no_grad():
        for layer in bases(model).values():
            layer.weight.mul_(0.5)
    other = make(layers=1)
    with torch.no_grad():
        for layer in bases(other).values():
            layer.weight.mul_(0.5)
    tigon.fuse(other, fp8=KEEP)
    second = step(model)
    assert not same(first, second)
    assert same(second, step(other))


def test_skipped_layers_stay():
    fusion = tigon.fuse(make(), fp8=tigon.FP8(first=0, skip=["o_proj", "layers.1.mlp"]))
    assert sorted((row.what.partition(":")[0], row.count) for row in rows(fusion)) == [
        ("down_proj", 1), ("gate_proj, up_proj", 2), ("q_proj, k_proj, v_proj", 6),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- weights released


@pytest.mark.parametrize("fp8", [KEEP, RELEASE], ids=["keep", "release"])
def test_few_tokens_run_in_bf16(fp8, monkeypatch):
    monkeypatch.setattr(fp8_layers, "_sizes_count", True)
    monkeypatch.setattr(fp8_layers, "LEAST_WIDTH", 1)
    monkeypatch.setattr(fp8_layers, "LEAST_INNER", 1)
    model, plain = make(layers=1), make(layers=1)
    if fp8 is RELEASE:
        round_bases(plain)
    fusion = tigon.fuse(model, fp8=fp8)
    assert rows(fusion)
    tigon.fuse(plain)
    assert same(step(model), step(plain))
    assert "tokens" in str(fusion.report())


def test_remove_restores_every_bit():
    model = make()
    before, parameters = step(model), list(model.parameters())
    with tigon.fuse(model, fp8=KEEP):
        assert not same(step(model), before)
    assert same(step(model), before)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert not any({"forward", "merge", "unmerge", "_tigon"} & vars(m).keys() for m in model.modules())


def test_remove_gives_released_weights_back_as_rounded():
    model = make()
    before = {name: m.weight.detach().clone() for name, m in bases(model).items()}
    parameters = list(model.parameters())
    fusion = tigon.fuse(model, fp8=RELEASE)
    assert all(type(m.weight) is ReplacedWeight for m in bases(model).values())
    assert all("remove() gives the weights as rounded" in row.what for row in rows(fusion))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parameters}
    assert sum(held.values()) < sum(w.nbytes for w in before.values())
    fusion.remove()
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for name, m in bases(model).items():
        assert 0.01 < (m.weight - before[name]).norm() / before[name].norm() < 0.04
    assert not any({"forward", "merge", "unmerge", "_tigon"} & vars(m).keys() for m in model.modules())


def test_a_released_model_is_saved_copied_and_pickled_whole(tmp_path):
    plain = round_bases(make(layers=1))
    model = make(layers=1)
    tigon.fuse(model, fp8=RELEASE)
    wanted = step(model)
    model.save_pretrained(tmp_path / "adapter")
    saved = peft.utils.load_peft_weights(str(tmp_path / "adapter"))
    assert saved.keys() == {n.replace(".default", "") for n in wanted[1]}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    states = [torch.load(file), model.state_dict()]
    for state in states:
        loaded = make(layers=1, seed=3)
        loaded.load_state_dict(state)
        assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in plain.state_dict().items())
    assert same(step(copy.deepcopy(model)), wanted)
    assert same(step(model), wanted)
    unpickled = pickle.loads(pickle.dumps(model))
    assert all(type(p) is nn.Parameter for p in unpickled.parameters())
    assert same(step(unpickled), step(plain))


def test_a_copy_has_its_own_weights():
    model = make(layers=1)
    fusion = tigon.fuse(model, fp8=RELEASE)
    wanted = step(model)
    copied = copy.deepcopy(model)
    fusion.remove()
    assert all(type(m.weight) is ReplacedWeight for m in bases(copied).values())
    assert same(step(copied), wanted)


def test_a_weight_that_two_layers_share_is_kept():
    model = make(layers=2)
    first, second = (layer.mlp.down_proj.base_layer for layer in model.base_model.model.model.layers)
    second.weight = first.weight
    fusion = tigon.fuse(model, fp8=RELEASE)
    assert type(first.weight) is nn.Parameter
    (row,) = [row for row in rows(fusion) if row.what.startswith("down_proj")]
    assert "another layer has the same weight" in row.what
    step(model)


def test_moving_a_released_model_raises():
    model = make(layers=1)
    tigon.fuse(model, fp8=RELEASE)
    model.to("cpu")
    with pytest.raises(RuntimeError, match="and cannot be written, trained or moved"):
        model.to(torch.float32)


def test_a_second_fuse_finds_released_weights():
    model = make(layers=1)
    tigon.fuse(model, fp8=RELEASE)
    wanted = step(model)
    tigon.fuse(model, fp8=RELEASE)
    assert same(step(model), wanted)


@pytest.mark.parametrize("fp8", [KEEP, RELEASE], ids=["keep", "release"])
def test_a_fused_model_is_freed(fp8):
    model = make(layers=1)
    tigon.fuse(model, fp8=fp8)
    step(model)
    gone = [weakref.ref(m) for m in model.modules()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in gone)
