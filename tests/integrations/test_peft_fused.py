"""LoRA adapters of PEFT in fused models: as right as PEFT's, kept smaller, and left to PEFT where Tigon has no rule."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers
from small_llama import batch, llama

import tigon
from tigon.ops.adapted_sum import adapted_sum
from tigon.ops.linear import lora_mlp
from tigon.ops.lora_dropout import draw_masks, keep_mask

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = ATTENTION + MLP
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, attn_implementation="eager"))


def mixtral():
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))


def gpt2():
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    )


def settled(model):
    """The same adapters on every side, B not zero."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "lora_A" in name else 0.1))
    return model


def adapted(make=llama, dtype=torch.float32, targets=ALL, pure=False, device="cpu", **options):
    """A model with adapters that do something; in fp32 unless `pure`, as PEFT leaves them."""
    torch.manual_seed(0)
    model = make().to(dtype).to(device)
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options
    config = peft.LoraConfig(target_modules=targets, **options)
    return settled(peft.get_peft_model(model, config, autocast_adapter_dtype=not pure)).train()


def step(model, inputs, autocast=False, device="cpu"):
    model.zero_grad()
    inputs = {k: v.to(device) for k, v in inputs.items()}
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach().float(), grads


def assert_as_right(fused, plain, truth):
    """No gradient is further from the truth than PEFT's, but for luck: over many draws the distances are the same."""
    assert fused[1].keys() == plain[1].keys() == truth[1].keys()
    assert (fused[0] - truth[0]).abs() <= 1.5 * (plain[0] - truth[0]).abs() + 2**-9 * truth[0]

    def distance(one):
        return sum((one[1][n] - g).square().sum() for n, g in truth[1].items()).sqrt()

    size = sum(g.square().sum() for g in truth[1].values()).sqrt()
    assert distance(plain) < 0.2 * size, "PEFT's own numbers are no measure here"
    assert distance(fused) <= 1.4 * distance(plain) + 1e-6 * size
    for name, g in truth[1].items():
        error, theirs = ((one[1][name] - g).norm() for one in (fused, plain))
        assert error <= 3 * theirs + 2**-7 * g.norm(), name


def assert_same_step(got, expected, tolerance=1e-5):
    """Loss and gradients to a few roundings of the largest of them."""
    torch.testing.assert_close(got[0], expected[0], rtol=3e-6, atol=0)
    assert got[1].keys() == expected[1].keys()
    assert expected[1]
    largest = max(g.abs().max() for g in expected[1].values())
    for name, g in expected[1].items():
        assert (got[1][name] - g).abs().max() <= tolerance * g.abs().max() + 2e-6 * largest, name


def checkpoint(reentrant, *models):
    for model in models:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()


def ran(fusion):
    return fusion.report().calls.get("adapters", 0)


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("make", [qwen3, gemma2, mixtral])
def test_a_step_in_fp32_is_peft_s(make, device):
    targets = ATTENTION if make is mixtral else ALL
    plain, model = adapted(make, targets=targets, device=device), adapted(make, targets=targets, device=device)
    fusion = tigon.fuse(model)
    (loss, grads), (expected, theirs) = step(model, batch(), device=device), step(plain, batch(), device=device)
    assert ran(fusion) == 2 * len(targets)
    assert_same_step((loss, grads), (expected, theirs))


MODES = {
    "bf16 under autocast": {"dtype": torch.bfloat16}, "fp32 under autocast": {"dtype": torch.float32},
    "bf16, adapters in fp32": {"dtype": torch.bfloat16}, "bf16": {"dtype": torch.bfloat16, "pure": True},
}  # fmt: skip


@pytest.mark.parametrize(("make", "mode"), [*((llama, mode) for mode in MODES), (qwen3, "bf16 under autocast")])
def test_no_further_from_the_truth_than_peft(make, mode, device):
    """The truth: the same numbers, widened to fp32 before anything is computed."""
    options = MODES[mode]
    plain, model, wide = (adapted(make, device=device, **options) for _ in range(3))
    fusion = tigon.fuse(model)
    autocast = "autocast" in mode
    fused = step(model, batch(), autocast, device)
    assert ran(fusion) == 14
    assert_as_right(fused, step(plain, batch(), autocast, device), step(wide.float(), batch(), device=device))


# --------------------------------------------------------------------------------------------------- what is grouped


def rows_of(fusion, fused=True):
    report = fusion.report()
    return {
        row.what: row.count for row in (report.fused_rows if fused else report.skipped_rows) if row.kind == "adapters"
    }


def test_the_report_says_which_layers_run_together():
    assert rows_of(tigon.fuse(adapted())) == {
        "LoRA: q_proj, k_proj, v_proj in one": 6, "LoRA: o_proj": 2, "LoRA: gate_proj, up_proj in one": 4,
        "LoRA: down_proj": 2,
    }  # fmt: skip
    assert rows_of(tigon.fuse(adapted(targets=["q_proj", "v_proj"]))) == {"LoRA: q_proj, v_proj in one": 4}


def products(monkeypatch):
    """The groups that are computed, by their number of layers."""
    from tigon.fusion.parts import adapters, mlp

    seen = []
    for module in (adapters, mlp):
        original = module.lora_linear
        monkeypatch.setattr(
            module, "lora_linear", lambda x, layers, o=original, **k: seen.append(len(layers)) or o(x, layers, **k)
        )
    return seen


@pytest.mark.parametrize("mlp", [True, False])
def test_the_projections_of_one_input_are_one_call(mlp, monkeypatch):
    seen = products(monkeypatch)
    tigon.fuse(model := adapted(), parts=tigon.PARTS if mlp else tigon.PARTS - {"mlp"})
    model(**batch())
    assert seen == [3, 1, 2, 1] * 2


class Plain(nn.Module):
    """Calls that are one group. Which calls are one is in tests/fusion/test_plain_layers.py."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


def small(kind, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q", "k", "v"], **options)
    return settled(peft.get_peft_model(nn.Sequential(kind()), config))


def test_a_sibling_that_fails_leaves_nothing_behind():
    model = small(Plain)
    fusion = tigon.fuse(model)
    layer = model.base_model.model[0]

    def fail(*_):
        raise KeyError("here")

    layer.v.register_forward_pre_hook(fail)  # v is then in no group, and k and q are
    with pytest.raises(KeyError):
        model(torch.ones(3, 8))
    assert not fusion._ledger.waiting
    handle = layer.k.base_layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(torch.ones(3, 8))
    assert not fusion._ledger.waiting
    handle.remove()


def test_a_call_outside_of_the_model_s_forward_and_the_next_one():
    """What waits for siblings is never another call's."""
    model, plain = small(Plain), small(Plain)
    tigon.fuse(model)
    layer, other = model.base_model.model[0], plain.base_model.model[0]
    x, z = torch.ones(3, 8), torch.zeros(3, 8)
    layer.q(x)
    torch.testing.assert_close(layer.k(z), other.k(z))
    torch.testing.assert_close(layer.k(x), other.k(x))
    layer.q(x)
    with torch.no_grad():
        x.add_(1)
        torch.testing.assert_close(layer.k(x), other.k(x))
    layer.q(x)
    with torch.no_grad():
        layer.v.lora_B["default"].weight.data = layer.v.lora_B["default"].weight.data.clone()
        assert not layer.v(x).requires_grad
    layer.q(x)
    layer.v.scaling["default"] = other.v.scaling["default"] = 7.0
    torch.testing.assert_close(layer.v(x), other.v(x))


# -------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_keeps_its_inputs_once_and_r_numbers(autocast, device):
    """Of q, k and v: x in the dtype it came in, and 3 r numbers a token; PEFT keeps x widened for each."""
    torch.manual_seed(0)
    sizes = {"fused": 0, "plain": 0}
    for side in sizes:
        model = small(Plain).to(device)
        for name, p in model.named_parameters():
            if "lora" not in name:
                p.data = p.data.bfloat16()
        if side == "fused":
            tigon.fuse(model, recompute="none")
        x = torch.randn(50, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
        saved = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t
        )
        with hooks, torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            model(x)
        kept = [t for pointer, t in saved.items() if pointer not in own and t.shape[0] == 50]
        sizes[side] = sum(t.untyped_storage().nbytes() for t in kept)
    assert sizes["fused"] == 50 * 3 * 2 * (2 if autocast else 4)
    assert sizes["plain"] > 50 * 8 * 4 + sizes["fused"]


# ------------------------------------------------------------------------------------------------------- checkpointing


# Each level with and without dropout, and with both kinds of checkpoints.
STEPS = [
    ("none", None, 0.0), ("product", None, 0.25), ("cheap", None, 0.0), ("mlp", None, 0.25), ("auto", None, 0.25),
    ("none", True, 0.0), ("cheap", False, 0.25), ("cheap", True, 0.0), ("mlp", False, 0.0), ("mlp", True, 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("recompute", "checkpointing", "dropout"), STEPS)
def test_levels_checkpoints_and_dropout(recompute, checkpointing, dropout, backend, device):
    """A whole model, where PEFT is given the dropout masks that were drawn: in every pass the same."""
    plain, model = (adapted(device=device, lora_dropout=dropout) for _ in range(2))
    fusion = tigon.fuse(model, recompute=recompute)
    if dropout:
        replaying(plain, dropout)
    if checkpointing is not None:
        checkpoint(checkpointing, model)
    inputs = batch(rows=1, length=9)
    torch.manual_seed(11)
    got = step(model, inputs, device=device)
    report = fusion.report()
    assert ran(fusion) >= 14
    assert not [what for what in rows_of(fusion, fused=False) if "drops" in what]
    if checkpointing is None and recompute != "auto":  # which may keep them or not, by the memory
        assert bool(report.tensors_not_kept) == (recompute in ("cheap", "mlp"))
    torch.manual_seed(11)
    with tigon.use_backend("auto"):
        assert_same_step(got, step(plain, inputs, device=device))


@pytest.mark.parametrize("obstacle", [None, "checkpoint", "hook", "mlp", "bias"])
def test_the_mlp_adds_to_the_stream(obstacle, monkeypatch, triton_backend, device):
    seen, calls = [], []
    monkeypatch.setattr(lora_mlp, "adapted_sum", lambda *args: calls.append(args) or adapted_sum(*args))
    plain, model = (adapted(device=device).bfloat16() for _ in range(2))
    if obstacle == "checkpoint":
        checkpoint(False, model)
    with tigon.use_backend("auto"):
        expected, theirs = step(plain, batch(rows=1, length=9), device=device)
    tigon.fuse(model, recompute="mlp" if obstacle == "mlp" else "cheap")
    layers = model.get_base_model().model.layers
    if obstacle == "hook":
        layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    if obstacle == "bias":
        for layer in layers:
            layer.mlp.down_proj.base_layer.bias = nn.Parameter(torch.zeros(32, device=device).bfloat16(), False)
    loss, grads = step(model, batch(rows=1, length=9), device=device)
    assert len(calls) == {None: 2, "checkpoint": 2, "hook": 1, "mlp": 0, "bias": 0}[obstacle]
    assert len(seen) == (obstacle == "hook")
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
    off = torch.stack([(grads[name] - g).norm() for name, g in theirs.items()]).norm()
    assert off <= 0.05 * torch.stack([g.norm() for g in theirs.values()]).norm()


def test_an_adapter_changed_by_hand_gets_the_sentence_of_the_operator(device):
    """Layers that fuse has read pass the operator's checks: those alone whose tensors fit each other."""
    model = adapted(device=device)
    tigon.fuse(model)
    layer = model.get_base_model().model.layers[0].self_attn.o_proj.lora_B["default"]
    layer.weight.data = layer.weight.data[:5]
    with pytest.raises(ValueError, match=r"lora_linear: layers\[0\].b must be \(32, \d+\), got \(5, \d+\)"):
        model(**{k: v.to(device) for k, v in batch().items()})


def test_two_forwards_before_one_backward(device):
    """What a checkpoint computes again is grouped as it was the first time, from the first step on."""
    model = adapted(device=device)
    checkpoint(False, model)
    tigon.fuse(model)
    inputs = {k: v.to(device) for k, v in batch().items()}
    (model(**inputs).loss + model(**inputs).loss).backward()
    twice = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    once = step(model, batch(), device=device)[1]
    for name, g in once.items():
        torch.testing.assert_close(twice[name].float(), 2 * g, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------- what PEFT can do to it


@pytest.fixture
def pair():
    plain, model = adapted(), adapted()
    fusion = tigon.fuse(model)
    return plain, model, fusion


def assert_same_loss(plain, model):
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, rtol=3e-6, atol=0)


def test_switching_merging_scaling(pair):
    plain, model, fusion = pair
    assert_same_loss(plain, model)
    with model.disable_adapter(), plain.disable_adapter():
        assert_same_loss(plain, model)
        assert ran(fusion) == 0
        assert "switched off or merged" in fusion.report().last_step()
    for m in (plain, model):
        m.merge_adapter()
    assert_same_loss(plain, model)
    for m in (plain, model):
        m.unmerge_adapter()
        for layer in m.modules():
            if hasattr(layer, "lora_A"):
                layer.scale_layer(3.0)
    assert_same_loss(plain, model)
    assert ran(fusion) == 14


def add_other(model, targets=ALL):
    torch.manual_seed(7)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def test_adapters_that_come_change_and_go(pair):
    plain, model, fusion = pair
    for m in (plain, model):
        add_other(m).set_adapter("other")
    assert_same_loss(plain, model)
    assert ran(fusion) == 14
    for m in (plain, model):
        m.base_model.set_adapter(["default", "other"])
    assert_same_loss(plain, model)
    assert ran(fusion) == 0
    assert "several adapters are active on it at once" in fusion.report().last_step()
    for m in (plain, model):
        m.set_adapter("default")
        m.delete_adapter("other")
    assert_same_loss(plain, model)
    assert ran(fusion) == 14


def test_adapters_on_layers_that_had_none():
    plain, model = adapted(targets=["q_proj"]), adapted(targets=["q_proj"])
    fusion = tigon.fuse(model)
    for m in (plain, model):
        add_other(m, MLP).set_adapter("other")
    assert_same_loss(plain, model)
    assert ran(fusion) == 6
    assert rows_of(fusion)["LoRA: gate_proj, up_proj in one"] == 4


def test_adapters_that_come_after_fuse():
    plain = adapted()
    torch.manual_seed(0)
    base = llama()
    fusion = tigon.fuse(base)
    model = settled(peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL))).train()
    assert_same_loss(plain, model)
    assert tigon.fuse(model) is fusion
    assert ran(fusion) == 14


def test_batches_that_mix_adapters(pair):
    plain, model, fusion = pair
    for m in (plain, model):
        add_other(m).eval()
    names = ["default", "other"]
    with torch.no_grad():
        got, expected = (m(**batch(), adapter_names=names).loss for m in (model, plain))
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=0)
    assert "adapter_names" in fusion.report().last_step()


def test_removal_restores_everything(pair):
    plain, model, fusion = pair
    before = [set(vars(m)) for m in plain.modules()]
    fusion.remove()
    assert [set(vars(m)) for m in model.modules()] == before
    got, expected = step(model, batch()), step(plain, batch())
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][n], g) for n, g in expected[1].items())


def test_left_out_by_its_keyword():
    fusion = tigon.fuse(model := adapted(), parts=tigon.PARTS - {"adapters"})
    model(**batch())
    assert "adapters" not in fusion.report().calls
    assert not rows_of(fusion)


def test_copies_pickles_and_files(pair, tmp_path):
    plain, model, fusion = pair
    twin = copy.deepcopy(model)
    fusion.remove()
    assert_same_loss(plain, twin)
    assert ran(tigon.fuse(twin)) == 14
    assert rows_of(tigon.fuse(twin))["LoRA: q_proj, k_proj, v_proj in one"] == 6
    loaded = pickle.loads(pickle.dumps(twin))
    assert not any("_tigon" in vars(m) for m in loaded.modules())
    assert_same_loss(plain, loaded)
    assert twin.state_dict().keys() == plain.state_dict().keys()
    twin.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / side / "adapter_model.safetensors").read_bytes() for side in ("fused", "plain")]
    assert files[0] == files[1]


def test_a_copied_group_computes_with_its_own_layers(monkeypatch):
    tigon.fuse(model := adapted())
    twin = copy.deepcopy(model)
    seen = products(monkeypatch)
    twin(**batch())
    assert seen == [3, 1, 2, 1] * 2


def test_hooks_on_layers_run(pair):
    plain, model, _ = pair
    seen = []
    for m in (plain, model):
        for layer in m.modules():
            if hasattr(layer, "lora_A"):
                layer.register_forward_hook(lambda module, args, y: seen.append(1) or 1.5 * y)
    assert_same_loss(plain, model)
    assert len(seen) == 28


def test_compiled_models_run_peft_s_code(device):
    torch._dynamo.reset()
    plain, model = adapted(device=device), adapted(device=device)
    fusion = tigon.fuse(model)
    compiled = torch.compile(model, backend="aot_eager")
    (loss, grads), (expected, theirs) = step(compiled, batch(), device=device), step(plain, batch(), device=device)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, g in theirs.items():
        torch.testing.assert_close(grads[f"_orig_mod.{name}"], g, rtol=1e-3, atol=1e-5)
    assert fusion.report().steps == 0
    assert "Under torch.compile adapters run in PEFT's own code." in fusion.report().last_step()
    # The same model runs fused again outside of the compiled one.
    step(model, batch(), device=device)
    assert ran(fusion) == 14
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------- dropout


class Replayed(nn.Module):
    """A layer's dropout on PEFT's side, with the masks that the fused layers draw: one seed for a group."""

    groups = (
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
        ("c_attn",),
        ("c_fc",),
    )
    drawn = None  # of the group that is running

    def __init__(self, name, p):
        super().__init__()
        (self.group,) = (group for group in self.groups if name in group)
        self.place, self.p = self.group.index(name), p

    def forward(self, x):
        if not self.place:
            Replayed.drawn = draw_masks([self.p] * len(self.group), x.device)
        keep = keep_mask(Replayed.drawn, self.place, x.shape[:-1].numel(), x.shape[-1])
        return x * keep.view(x.shape) / (1 - self.p)


def replaying(model, p):
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = Replayed(name.rpartition(".")[2], p)
    return model


def test_dropout_beside_layers_that_multiply_by_themselves(backend, device):
    options = {"targets": ["c_attn", "c_fc"], "fan_in_fan_out": True, "lora_dropout": 0.25}
    plain, model = (adapted(gpt2, device=device, **options) for _ in range(2))
    fusion = tigon.fuse(model)
    replaying(plain, 0.25)
    torch.manual_seed(11)
    loss, grads = step(model, batch(), device=device)
    assert ran(fusion) == 4
    torch.manual_seed(11)
    with tigon.use_backend("auto"):
        expected, theirs = step(plain, batch(), device=device)
    assert_same_step((loss, grads), (expected, theirs))


def test_dropout_is_for_training(device):
    plain, model = (adapted(device=device, lora_dropout=0.25) for _ in range(2))
    fusion = tigon.fuse(model)
    inputs = {k: v.to(device) for k, v in batch().items()}
    losses = [model(**inputs).loss.item() for _ in range(2)]
    assert losses[0] != losses[1]
    for m in (plain, model):
        m.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, rtol=3e-6, atol=0)
    assert ran(fusion) == 14


def test_dropout_that_changes_after_fuse(pair):
    """The module is read at each call: its probability, its mode, and whether it is torch's own."""
    plain, model, fusion = pair
    for layer in model.modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = nn.Dropout(0.5)
    first, second = (step(model, batch())[0] for _ in range(2))
    assert first != second
    assert ran(fusion) == 14
    for layer in model.modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"].p = 0.0
    assert_same_loss(plain, model)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.lora_dropout["default"].register_forward_hook(lambda *_: None)
    assert_same_loss(plain, model)
    assert ran(fusion) == 13
    layer.lora_dropout["default"] = nn.AlphaDropout(0.5)
    step(model, batch())
    assert ran(fusion) == 13
    layer.lora_dropout["default"] = nn.Dropout(1.0)
    step(model, batch())
    assert ran(fusion) == 13
    assert "drops every element" in fusion.report().last_step()


# ------------------------------------------------------------------------------------------------ what is left to PEFT


LEFT = {
    "DoRA": ({"use_dora": True}, "a LoRA variant"),
    "a bias of the adapter": ({"lora_bias": True}, "has a bias"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_named_and_right(name):
    options, reason = LEFT[name]
    plain, model = adapted(**options), adapted(**options)
    fusion = tigon.fuse(model)
    assert [what for what in rows_of(fusion, fused=False) if reason in what]
    torch.manual_seed(3)
    expected = step(plain, batch())
    torch.manual_seed(3)
    got = step(model, batch())
    torch.testing.assert_close(got[0], expected[0], rtol=3e-6, atol=0)
    assert got[1].keys() == expected[1].keys()
    assert ran(fusion) == 0


def test_embeddings_and_the_head_are_left_and_named():
    plain, model = (adapted(targets=["q_proj", "embed_tokens", "lm_head"]) for _ in range(2))
    fusion = tigon.fuse(model)
    assert list(rows_of(fusion, fused=False)) == ["its adapters are not on a linear layer"]
    assert rows_of(fusion) == {"LoRA: q_proj": 2}
    assert_same_loss(plain, model)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_of_the_base_layers_that_are_trained_get_their_gradients(bias):
    def qwen2():
        sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))  # biases in q, k and v
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("bias"):
                    p.normal_(std=0.3)
        return model

    plain, model = adapted(qwen2, bias=bias), adapted(qwen2, bias=bias)
    fusion = tigon.fuse(model)
    (loss, grads), (expected, theirs) = step(model, batch()), step(plain, batch())
    assert ran(fusion) == 14
    assert sum(name.endswith("base_layer.bias") for name in theirs) == 6
    assert_same_step((loss, grads), (expected, theirs))


def test_a_trained_base_layer_gets_its_gradient():
    plain, model = adapted(), adapted()
    fusion = tigon.fuse(model)
    for m in (plain, model):
        for name, p in m.named_parameters():
            if "q_proj.base_layer" in name:
                p.requires_grad_()
    got, expected = step(model, batch()), step(plain, batch())
    assert got[1].keys() == expected[1].keys()
    assert "base layer's weight is trained too" in fusion.report().last_step()
    assert ran(fusion) == 12


def test_layers_with_hooks_inside_are_peft_s(pair):
    plain, model, fusion = pair
    seen = []
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].register_forward_hook(
        lambda *_: seen.append(1)
    )
    model.base_model.model.model.layers[1].self_attn.k_proj.base_layer.register_forward_hook(lambda *_: seen.append(1))
    assert_same_loss(plain, model)
    assert len(seen) == 2
    assert ran(fusion) == 12


def test_devices_that_do_not_fit_are_peft_s_to_refuse(pair):
    _, model, fusion = pair
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.lora_A["default"].weight = nn.Parameter(torch.empty(4, 64, device="meta"))
    with contextlib.suppress(RuntimeError):
        model(**batch())
    assert "incompatible dtypes or devices" in fusion.report().last_step()


# --------------------------------------------------------------------------------------------------------------- QLoRA


def quantised(layer, compute_dtype):
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=compute_dtype, quant_type="nf4"
    )
    linear.weight = bnb.nn.Params4bit(layer.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    return linear


def qlora(dtype, device, move=True, **options):
    """The small Llama in nf4, with adapters; bitsandbytes quantises when a layer moves to its device."""
    torch.manual_seed(0)
    base = llama().to(dtype).to(device)
    for layer in base.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear):
                    linear = quantised(child.cpu(), dtype)
                    setattr(owner, name, linear.to(device) if move else linear)
    base.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM", **options)
    return settled(peft.get_peft_model(base.requires_grad_(False), config)).train()


@pytest.mark.parametrize("autocast", [False, True])
def test_qlora(autocast, device):
    pytest.importorskip("bitsandbytes")
    dtype = torch.bfloat16 if autocast else torch.float32
    plain, model = (qlora(dtype, device) for _ in range(2))
    fusion = tigon.fuse(model)
    got, expected = step(model, batch(), autocast, device), step(plain, batch(), autocast, device)
    assert ran(fusion) == 14
    tolerance = {"rtol": 0.02, "atol": 0.0} if autocast else {"rtol": 3e-6, "atol": 0.0}
    torch.testing.assert_close(got[0], expected[0], **tolerance)
    assert got[1].keys() == expected[1].keys()
    for name, g in expected[1].items():
        assert (got[1][name] - g).norm() <= (0.05 if autocast else 1e-5) * g.norm(), name


def test_a_quantised_layer_without_state_is_named(device):
    pytest.importorskip("bitsandbytes")
    model = qlora(torch.float32, "cpu", move=False)
    fusion = tigon.fuse(model)
    with contextlib.suppress(Exception):
        model(**batch())
    assert "no quantisation state" in fusion.report().last_step()


# ----------------------------------------------------------------------------------------------------- sharded weights


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fsdp2_gathers_what_the_fused_layers_read(checkpointed, process_group, device):
    """Outside of a layer's call its weights are DTensors; inside they are whole, also in the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (1,))
    plain, model = adapted(device=device), adapted(device=device)
    fusion = tigon.fuse(model, parts=tigon.PARTS - {"head"})
    if checkpointed:
        checkpoint(False, plain, model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = step(plain, batch(), device=device)
    model.zero_grad()
    loss = model(**{k: v.to(device) for k, v in batch().items()}).loss
    loss.backward()
    assert ran(fusion) >= 14
    torch.testing.assert_close(loss.detach().float(), expected[0], rtol=3e-6, atol=0)
    largest = max(g.abs().max() for g in expected[1].values())
    for name, p in model.named_parameters():
        if name in expected[1]:
            g = expected[1][name]
            assert (p.grad.full_tensor() - g).abs().max() <= 1e-5 * g.abs().max() + 2e-6 * largest, name
