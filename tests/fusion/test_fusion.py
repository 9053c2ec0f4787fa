"""fuse() on one instance: put on, reported, copied, pickled, wrapped, taken off; nothing else changes."""

import copy
import gc
import io
import json
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_families import CALLS, assert_close, step
from torch import nn

import tigon
from tigon.fusion.engine.part import ModulePart
from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.parts.rotary_formula import Turn

transformers = pytest.importorskip("transformers")
from zoo import BASE, batch, build  # noqa: E402


@pytest.fixture(scope="module")
def llama():
    """One model for the tests that leave it as they found it."""
    model = build("llama")
    yield model
    assert not any("_tigon" in vars(m) or "forward" in vars(m) for m in model.modules())


def logits_of(model):
    return model(**batch("llama")).logits


# ---------------------------------------------------------------------------------------------- nothing else changes


def test_parameters_and_state_are_the_same(llama):
    state = {k: v.clone() for k, v in llama.state_dict().items()}
    names, devices = [n for n, _ in llama.named_modules()], [p.data_ptr() for p in llama.parameters()]
    with tigon.fuse(llama):
        assert llama.state_dict().keys() == state.keys()
        assert all(torch.equal(v, state[k]) for k, v in llama.state_dict().items())
        assert [n for n, _ in llama.named_modules()] == names
        assert [p.data_ptr() for p in llama.parameters()] == devices


# -------------------------------------------------------------------------------------------------------- on and off


def test_twice_is_once(llama):
    fusion = tigon.fuse(llama)
    assert tigon.fuse(llama) is fusion
    step(llama, batch("llama"))
    assert fusion.report().calls == CALLS["llama"]
    fusion.remove()
    fusion.remove()
    again = tigon.fuse(llama)
    assert again is not fusion
    again.remove()


def test_options_of_a_second_call_are_not_dropped_silently(llama, recwarn):
    fusion = tigon.fuse(llama, recompute="mlp")
    wrapper = torch.nn.Sequential(llama)
    for model in (llama, wrapper, copy.deepcopy(llama)):
        tigon.fuse(model)
        tigon.fuse(model, recompute="mlp", parts=tigon.PARTS)
        assert not recwarn.list
        with pytest.warns(
            UserWarning,
            match=r"with parts=\(.*'mlp'.*\), recompute='mlp', and stays so; to fuse with parts=.* remove\(\)",
        ):
            again = tigon.fuse(model, recompute="none", parts=tigon.PARTS - {"mlp"})
        recwarn.clear()
    assert again is not fusion
    fusion.remove()


def test_the_context_removes_it_after_an_error_too(llama):
    fusion = tigon.fuse(llama)
    assert isinstance(fusion, tigon.Fusion)
    with pytest.raises(ZeroDivisionError), fusion:
        raise ZeroDivisionError
    assert "forward" not in vars(llama.lm_head)
    assert not fusion.report().active


class Interrupting(dict):
    """The attributes of a module whose n-th change by fuse is interrupted, as by Ctrl-C."""

    left = 0

    def __setitem__(self, name, value):
        if name in ("_tigon", "forward", "_replicate_for_data_parallel"):
            Interrupting.left -= 1
            if Interrupting.left == 0:
                raise KeyboardInterrupt
        super().__setitem__(name, value)


@pytest.mark.parametrize("change", [1, 2, 3, 10, 23])
def test_fuse_that_is_interrupted_leaves_the_model_as_it_was(llama, change):
    plain = {m: vars(m) for m in llama.modules()}
    before = {m: set(state) for m, state in plain.items()}
    try:
        for module, state in plain.items():
            module.__dict__ = Interrupting(state)
        Interrupting.left = change
        with pytest.raises(KeyboardInterrupt):
            tigon.fuse(llama)
        assert Interrupting.left <= 0, "fuse has changed a module before"
        assert {m: set(vars(m)) for m in llama.modules()} == before
    finally:
        for module, state in plain.items():
            module.__dict__ = state
    with tigon.fuse(llama) as fusion:
        step(llama, batch("llama"))
        assert fusion.report().calls == CALLS["llama"]


def test_an_error_of_a_recognition_leaves_the_model_as_it_was(llama, monkeypatch):
    def fails(module):
        raise MemoryError

    monkeypatch.setattr("tigon.fusion.engine.part.REGISTRY", [ModulePart("mlp", fails, fails)])
    with pytest.raises(MemoryError):
        tigon.fuse(llama)
    assert not any("_tigon" in vars(m) or "forward" in vars(m) for m in llama.modules())
    assert "_tigon_fusion" not in vars(llama)


@pytest.mark.parametrize("kind", ["head", "norm", "mlp", "rotary", "linear"])
def test_each_kind_can_be_left_out(llama, kind):
    inputs = batch("llama")
    plain = llama(**inputs).loss
    with tigon.fuse(llama, parts=tigon.PARTS - {kind}) as fusion:
        torch.testing.assert_close(llama(**inputs).loss, plain, rtol=2e-6, atol=0)
        calls = {k: v for k, v in CALLS["llama"].items() if not k.endswith(kind)}
        if kind == "mlp":
            calls["linear"] += 2  # gate and up then have one operation, as q, k and v
        assert fusion.report().calls == calls


def test_where_chooses_the_modules(llama):
    inputs = batch("llama")
    plain, layers = llama(**inputs).loss, CALLS["llama"]
    with tigon.fuse(llama, where=lambda name, module: not name.startswith("model.layers.0.mlp")) as fusion:
        torch.testing.assert_close(llama(**inputs).loss, plain, rtol=2e-6, atol=0)
        assert fusion.report().calls["mlp"] == layers["mlp"] - 1
        assert [(row.kind, row.count, row.what) for row in fusion.report().skipped_rows] == [
            ("mlp", 1, "where= excludes it")
        ]
        twin = copy.deepcopy(llama)
        twin(**inputs)
        assert vars(twin)["_tigon_fusion"].report().calls["mlp"] == layers["mlp"] - 1
    with tigon.fuse(llama, where=lambda name, module: module is not llama.lm_head) as fusion:
        llama(**inputs)
        assert "head" not in fusion.report().calls
        assert fusion.report().calls["norm"] == layers["norm"]


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("parts", ["norms"], r"^fuse: parts must be names among head, norm, .*, got .*'norms'"),
        ("parts", "norm", r"^fuse: parts must be names among head, norm, .*, got 'norm'\.$"),
        ("where", "lm_head", r"^fuse: where must be a function of a module's name and the module, got 'lm_head'\.$"),
    ],
)
def test_a_choice_that_is_none_gets_a_sentence(llama, option, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        tigon.fuse(llama, **{option: value})


@pytest.mark.parametrize("bad", [None, "gpt2", torch.zeros(3), lambda x: x, nn.Linear])
def test_what_is_no_module_gets_a_sentence(bad):
    with pytest.raises(TypeError, match=r"^fuse: model must be a torch\.nn\.Module, got \w+\.$"):
        tigon.fuse(bad)


def test_a_model_with_nothing_to_fuse_gets_a_report_that_says_so():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.GroupNorm(2, 4))
    x = torch.randn(2, 3)
    expected = model(x)
    fusion = tigon.fuse(model)
    report = fusion.report()
    assert report.fused_rows == []
    assert str(report).startswith("Sequential: nothing to fuse")
    assert {row.kind: row.what for row in report.skipped_rows} == {"norm": "it does not norm each row by itself"}
    assert torch.equal(model(x), expected)
    assert tigon.fuse(model) is fusion
    fusion.remove()
    assert "_tigon_fusion" not in vars(model)


def test_a_single_norm_is_a_model_too():
    model, x = nn.RMSNorm(4, eps=1e-5), torch.randn(2, 4)
    expected = model(x)
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(x), expected)
        assert fusion.report().calls == {"norm": 1}
    assert torch.equal(model(x), expected)


def test_two_rotary_functions_in_one_forward_are_one_replacement():
    with tigon.fuse(build("deepseek_v3")) as fusion:
        rotary = [(row.fused, row.count, row.what) for row in fusion.report().rows if row.kind == "rotary"]
    assert rotary == [(True, 2, "part and rotate halves, full")]


class Outer(nn.Module):
    """A model that computes the loss of the logits of another, and has no head to show."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.inner(input_ids, **kwargs).logits
        loss = None if labels is None else self.inner.loss_function(logits, labels, logits.shape[-1])
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_labels_that_an_outer_model_keeps_to_itself():
    model, inputs = Outer(build("llama")), batch("llama")
    plain, plain_grads = step(model, inputs)
    with tigon.fuse(model) as fusion:
        fused, fused_grads = step(model, inputs)
        assert fusion.report().calls == CALLS["llama"]
        assert fusion.report().logits_built_by == {}
        assert type(model(**{k: v for k, v in inputs.items() if k != "labels"}).logits) is torch.Tensor
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.inner)


class OuterWithAModule(Outer):
    """As Bart and T5 compute their loss."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.inner(input_ids, **kwargs).logits
        loss = nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels.view(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_loss_module_made_in_the_forward_compiles():
    model, inputs = OuterWithAModule(build("llama")), batch("llama")
    plain, plain_grads = step(model, inputs)
    with tigon.fuse(model) as fusion:
        step(model, inputs)
        assert fusion.report().calls["head"] == 1
        fused, fused_grads = step(torch.compile(model, fullgraph=True, backend="eager"), inputs)
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close({n.removeprefix("_orig_mod."): g for n, g in fused_grads.items()}, plain_grads)


class Turned(nn.Module):
    """Calls a rotary function with and without k, by position and by name."""

    def forward(self, q, k, cos, sin):
        alone = turn_one_or_two(q, cos=cos, sin=sin)
        return alone, *turn_one_or_two(q, k, cos, sin)


def turn_one_or_two(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = (t.unsqueeze(unsqueeze_dim).repeat_interleave(2, dim=-1) for t in (cos, sin))
    turned = tuple(
        x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k) if x is not None
    )
    return turned[0] if k is None else turned


def test_a_rotary_function_of_one_tensor_or_two():
    model, plain = Turned(), Turned()
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    cos, sin, other = (torch.randn(2, 5, 8) for _ in range(3))
    with tigon.fuse(model, parts=tigon.PARTS - {"head"}) as fusion:
        # The angles are spread once for all layers: not so others beside the same cos, nor what is written into it.
        for step, second in enumerate((sin, sin, other, other, other)):
            if step > 2:
                (cos, other)[step - 3].mul_(2.0)
            for fused, expected in zip(model(q, k, cos, second), plain(q, k, cos, second), strict=True):
                torch.testing.assert_close(fused, expected)
        assert fusion.report().calls == {"rotary": 10}


def turn_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), -sin.unsqueeze(unsqueeze_dim)
    first, second = (torch.stack(x.chunk(2, dim=-1)) for x in (q, k))
    return tuple(x * cos + torch.cat((-h[1], h[0]), -1) * sin for x, h in ((q, first), (k, second)))


class TurnedBack(nn.Module):
    """As in NanoChat."""

    def forward(self, q, k, cos, sin):
        return turn_back(q, k, cos, sin)


def test_spread_angles_do_not_outlive_a_step():
    model, q, k = TurnedBack(), torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    with tigon.fuse(model, parts=tigon.PARTS - {"head"}) as fusion:
        for _ in range(2):
            angles = [torch.randn(2, 5, 16) for _ in range(2)]
            for fused, expected in zip(model(q, k, *angles), turn_back(q, k, *angles), strict=True):
                torch.testing.assert_close(fused, expected)
            alive = [weakref.ref(t) for t in angles]
            del angles
            gc.collect()
            assert [t() for t in alive] == [None, None]
        assert fusion.report().calls == {"rotary": 2}


@pytest.mark.parametrize("model_class", [Turned, TurnedBack])
def test_angles_spread_in_inference_mode_are_not_kept(model_class):
    model, plain = model_class(), model_class()
    q, k = torch.randn(2, 4, 5, 16, requires_grad=True), torch.randn(2, 2, 5, 16)
    cos, sin = (torch.randn(2, 5, 8 if model_class is Turned else 16) for _ in range(2))
    with torch.inference_mode():
        others = cos.clone(), sin.clone()
    with tigon.fuse(model, parts=tigon.PARTS - {"head"}):
        with torch.inference_mode():
            for _ in range(2):  # nothing counts what is written into these
                for fused, expected in zip(model(q, k, *others), plain(q, k, *others), strict=True):
                    torch.testing.assert_close(fused, expected)
                others[1].mul_(2.0)
            model(q, k, cos, sin)
        fused, expected = (torch.autograd.grad(m(q, k, cos, sin)[0].sum(), q)[0] for m in (model, plain))
    torch.testing.assert_close(fused, expected)


def test_angles_are_spread_within_a_captured_graph(monkeypatch):
    spreads, spread = [], Turn.spread
    monkeypatch.setattr(Turn, "spread", lambda *args: spreads.append(1) or spread(*args))
    model, q, k = TurnedBack(), torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    cos, sin = (torch.randn(2, 5, 16) for _ in range(2))
    with tigon.fuse(model, parts=tigon.PARTS - {"head"}):
        model(q, k, cos, sin)
        spreads.clear()
        model(q, k, cos, sin)
        assert not spreads
        monkeypatch.setattr("tigon.fusion.parts.rotary.is_captured", lambda t: True)
        model(q, k, cos, sin)
        assert spreads


def test_a_fused_part_of_a_model_stays_with_its_own_fusion(llama):
    inner = tigon.fuse(llama.model)
    outer = tigon.fuse(llama)
    assert outer is not inner
    assert {row.kind for row in outer.report().fused_rows} == {"head"}
    assert {row.what for row in outer.report().skipped_rows} == {"fused before, by another tigon.fuse"}
    step(llama, batch("llama"))
    outer.remove()
    assert tigon.fuse(llama.model) is inner
    inner.remove()


# ------------------------------------------------------------------------------------------------------------- report


def test_the_report_says_what_and_how_often():
    model = build("mixtral")
    with tigon.fuse(model) as fusion:
        assert "No step has run yet" in str(fusion.report())
        outputs, _ = step(model, batch("mixtral"))
        report = fusion.report()
        assert [(row.kind, row.name, row.count, row.calls) for row in report.fused_rows] == [
            ("head", "Linear", 1, 1), ("rotary", "MixtralAttention", 2, 2), ("experts", "MixtralExperts", 2, 2),
            ("norm", "MixtralRMSNorm", 5, 5), ("add_norm", "MixtralDecoderLayer", 2, 2),
            ("linear", "MixtralAttention", 2, 2), ("documents", "MixtralAttention", 2, 0),
        ]  # fmt: skip
        assert report.skipped_rows == []
        assert "Ran in the last step: head 1, norm 5, add_norm 2, experts 2, rotary 2, linear 2." in str(report)
        calls = {"head": 1, "norm": 5, "add_norm": 2, "rotary": 2, "experts": 2, "linear": 2}
        assert json.loads(json.dumps(report.to_dict()))["calls"] == calls
        outputs.logits.argmax(-1)
        assert fusion.report().logits_built_by == {"argmax": 1}
        assert "Logits were built by argmax (1×)." in str(fusion.report())
        model(**batch("mixtral"))
        assert fusion.report().logits_built_by == {}, "each step counts anew"
    assert str(fusion.report()).splitlines()[0].endswith("removed again")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen2_5_vl"])
def test_the_report_fits_a_screen(family):
    model = build(family)
    with tigon.fuse(model) as fusion:
        lines = str(fusion.report()).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 130


def test_the_report_as_a_rich_table(llama):
    rich = pytest.importorskip("rich.console")
    with tigon.fuse(llama) as fusion:
        step(llama, batch("llama"))
        console = rich.Console(width=120, file=io.StringIO())
        console.print(fusion.report().to_rich())
    text = console.file.getvalue()
    assert "LlamaRMSNorm" in text
    assert "head 1, norm 5, add_norm 2, mlp 2, rotary 2" in text


def test_a_part_that_never_runs_shows_zero(llama):
    """Counts are of calls, not of patches."""
    with tigon.fuse(llama) as fusion:
        llama.model(input_ids=batch("llama")["input_ids"])
        llama(**batch("llama"))
        llama(input_ids=batch("llama")["input_ids"])
        assert fusion.report().calls == {k: v for k, v in CALLS["llama"].items() if k != "head"}
        assert "head 0" in str(fusion.report())


# --------------------------------------------------------------------------------------- when the logits are left out


def test_without_labels_logits_are_real(llama):
    inputs = batch("llama")
    labels = inputs.pop("labels")
    with tigon.fuse(llama):
        assert type(llama(**inputs).logits) is torch.Tensor
        assert type(llama(**inputs, labels=labels).logits) is LazyLogits
        assert type(llama(**inputs).logits) is torch.Tensor
        names = ["input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels"]
        values = {**inputs, "labels": labels}
        assert type(llama(*(values.get(n) for n in names)).logits) is LazyLogits, "labels by position"


def test_labels_that_fail_leave_no_trace(llama):
    inputs = batch("llama")
    with tigon.fuse(llama):
        with pytest.raises((ValueError, RuntimeError)):
            llama(**{**inputs, "labels": inputs["labels"][:, :3]})
        assert type(llama(input_ids=inputs["input_ids"]).logits) is torch.Tensor


def test_shift_labels(llama):
    """Sequence parallel training shifts labels itself and takes the loss outside of the model."""
    inputs = batch("llama")
    labels = inputs.pop("labels")
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()

    def run():
        logits = llama(**inputs, shift_labels=shifted).logits
        return logits, llama.loss_function(logits, None, BASE["vocab_size"], shift_labels=shifted)

    _, plain = run()
    with tigon.fuse(llama) as fusion:
        logits, fused = run()
        assert type(logits) is LazyLogits
        assert fusion.report().calls["head"] == 1
    torch.testing.assert_close(fused, plain, rtol=2e-6, atol=0)


@pytest.mark.parametrize("keep", [3, torch.tensor([2, 5, 11])], ids=["last", "chosen"])
def test_logits_to_keep(llama, keep):
    inputs = batch("llama")
    size = keep if isinstance(keep, int) else len(keep)
    inputs["labels"] = inputs["labels"][:, -size:]
    plain = llama(**inputs, logits_to_keep=keep)
    with tigon.fuse(llama) as fusion:
        fused = llama(**inputs, logits_to_keep=keep)
        assert fusion.report().calls["head"] == 1
        assert fused.logits.shape == plain.logits.shape
        torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
        torch.testing.assert_close(fused.logits, plain.logits)


# ------------------------------------------------------------------------------------------------- copies and pickles


def test_a_deep_copy_is_fused_in_its_own_right():
    model, inputs = build("llama"), batch("llama")
    plain, plain_grads = step(model, inputs)
    fusion = tigon.fuse(model)
    twin = copy.deepcopy(model)
    for (name, m), (_, t) in zip(model.named_modules(), twin.named_modules(), strict=True):
        if "forward" in vars(m):
            assert vars(t)["forward"].__self__ is t, name
    twin_fusion = tigon.fuse(twin)
    assert twin_fusion is not fusion
    assert twin_fusion.model is twin
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fused, fused_grads = step(twin, inputs)  # with its own weights
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)
    assert twin_fusion.report().calls == CALLS["llama"]
    assert fusion.report().calls == {}, "each counts for itself"
    fusion.remove()
    assert type(logits_of(twin)) is LazyLogits, "and goes for itself"
    twin_fusion.remove()
    assert not any("_tigon" in vars(m) or "forward" in vars(m) for m in twin.modules())
    assert torch.equal(twin(**inputs).loss, plain.loss)


def test_a_copied_layer_is_its_own_and_counts_with_its_model(llama):
    with tigon.fuse(llama) as fusion:
        layer = copy.deepcopy(llama.model.layers[0])
        assert layer.mlp.forward.__self__ is layer.mlp
        with torch.no_grad():
            layer.mlp.down_proj.weight.zero_()
        x = torch.randn(2, 3, BASE["hidden_size"])
        assert not layer.mlp(x).any()
        assert llama.model.layers[0].mlp(x).any()
        report = fusion.report()
        assert (report.calls, report.outside) == ({}, 2), "no step of the model"
        assert "Outside the model's forward, and not counted: 2 calls of parts." in str(report)
    assert not layer.mlp(x).any(), "a copy outlives remove(), as a plain layer"


def test_a_data_parallel_replica_runs_on_its_own_weights(llama):
    """nn.DataParallel copies __dict__: a forward bound to the original would run on the original's device."""
    with tigon.fuse(llama):
        norm = llama.model.norm
        replica = norm._replicate_for_data_parallel()
        replica.weight = torch.zeros_like(norm.weight)
        x = torch.randn(2, BASE["hidden_size"])
        assert not replica(x).any()
        assert norm(x).any()


def test_fused_again_around_a_wrapper_of_the_first_fusion():
    model, inputs = build("llama"), batch("llama")
    plain = model(**inputs).loss
    fusion = tigon.fuse(model)
    model.forward = types.MethodType(lambda self, *a, inner=model.forward, **k: inner(*a, **k), model)
    fusion.remove()
    with tigon.fuse(model) as again:
        outputs = model(**inputs)
        assert again.report().calls == CALLS["llama"]
        torch.testing.assert_close(outputs.loss, plain, rtol=2e-6, atol=0)
    assert torch.equal(model(**inputs).loss, plain)


def test_a_forward_that_was_replaced_before_is_left_alone():
    model, inputs = build("llama"), batch("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)
    plain = model(**inputs).loss
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(**inputs).loss, plain, rtol=2e-6, atol=0)
        ((name, reason),) = [(row.name, row.what) for row in fusion.report().skipped_rows]
        assert name == "LlamaMLP"
        assert reason.startswith("its forward is already replaced on this instance")
        assert fusion.report().calls["mlp"] == 1


# ------------------------------------------------------------------------------------------ changes after the fusion


def test_hooks_keep_firing():
    model, inputs = build("llama"), batch("llama")
    layer, seen = model.model.layers[0], []
    for name, module in (
        ("head", model.lm_head), ("norm", layer.input_layernorm), ("mlp", layer.mlp), ("attention", layer.self_attn),
        ("gate", layer.mlp.gate_proj), ("act", layer.mlp.act_fn), ("model", model),
    ):  # fmt: skip
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    plain = model(**inputs).loss
    before, seen[:] = list(seen), []
    with tigon.fuse(model):
        torch.testing.assert_close(model(**inputs).loss, plain, rtol=2e-6, atol=0)
    assert seen == before


def test_a_hook_that_changes_the_logits_is_obeyed():
    model, inputs = build("llama"), batch("llama")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5 + 1.0)
    plain, plain_grads = step(model, inputs)
    with tigon.fuse(model):
        fused, fused_grads = step(model, inputs)
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)


@pytest.mark.parametrize("where", ["lm_head", "model.layers.0.mlp"])
def test_backward_hooks_see_their_gradients(where):
    model, inputs = build("llama"), batch("llama")
    seen = []
    model.get_submodule(where).register_full_backward_hook(lambda m, gin, gout: seen.append((gin[0], gout[0])))
    _, plain_grads = step(model, inputs)
    with tigon.fuse(model):
        _, fused_grads = step(model, inputs)
    assert_close(fused_grads, plain_grads)
    (plain_in, plain_out), (fused_in, fused_out) = seen
    torch.testing.assert_close(fused_in, plain_in, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(fused_out, plain_out, rtol=1e-4, atol=1e-8)


def test_settings_changed_after_the_fusion_are_obeyed():
    model, inputs = build("llama"), batch("llama")
    with tigon.fuse(model) as fusion:
        model.model.norm.variance_epsilon = 0.3
        model.model.layers[0].mlp.act_fn = nn.ReLU()
        model.model.layers[1].input_layernorm.weight = nn.Parameter(torch.rand(BASE["hidden_size"]))
        fused = model(**inputs).loss
        assert fusion.report().calls["mlp"] == 1
    assert torch.allclose(model(**inputs).loss, fused, rtol=2e-6)


def test_dtype_and_mode_changes():
    model, inputs = build("llama"), batch("llama")
    with tigon.fuse(model) as fusion:
        assert not model.eval().training
        assert model.train().training
        model.bfloat16()
        assert model(**inputs).logits.dtype == torch.bfloat16
        assert fusion.report().calls == CALLS["llama"]
        model.float()
        assert model(**inputs).loss.dtype == torch.float32


def test_cos_that_requires_a_gradient_goes_to_the_plain_rotation():
    model, inputs = build("llama"), batch("llama")
    with tigon.fuse(model) as fusion:
        x = torch.randn(2, 5, BASE["hidden_size"])
        cos, sin = (torch.rand(2, 5, BASE["head_dim"], requires_grad=True) for _ in range(2))
        attention = model.model.layers[0].self_attn
        out, _ = attention(x, position_embeddings=(cos, sin), attention_mask=None)
        out.sum().backward()
        assert cos.grad is not None
        assert "rotary" not in fusion.report().calls
        model(**inputs)
        assert fusion.report().calls["rotary"] == 2


# ------------------------------------------------------------------------------------------------------- meta device


def test_a_70b_model_on_the_meta_device_is_recognised_without_memory():
    import resource

    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = tigon.fuse(model).report()
    assert {row.kind: row.count for row in report.fused_rows} == {
        "head": 1, "norm": 161, "add_norm": 80, "mlp": 80, "rotary": 80, "linear": 80,
            "documents": 80,
    }  # fmt: skip
    assert not report.skipped_rows
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100 * 1024, "KiB: one MLP would take 2.6 GiB"


# ------------------------------------------------------------------------------------- what is kept for the backward


def test_a_fusion_that_replaced_nothing_does_not_stand_in_the_way():
    model = build("llama")
    empty = tigon.fuse(model, parts=())
    assert empty.report().fused_rows == []
    assert tigon.fuse(model, parts=[]) is empty
    assert tigon.fuse(model).report().fused_rows
