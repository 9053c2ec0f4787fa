"""tigon.compress.feed_forward: recognition, every method, what is left alone, and the way back."""

import argparse
import copy
import itertools
import json
import math

import pytest
import torch
from compress_made import FAMILIES, IDS, answer, llama, make_model
from torch import nn

import tigon
from tigon import compress
from tigon.compress import builder, calibration
from tigon.compress.candidates import Candidate, Layer
from tigon.compress.plan import plan
from tigon.compress.recognition import find_feed_forwards


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_recognised_compressed_and_put_back(family):
    *_, formula, name = FAMILIES[family]
    model = make_model(family)
    before, modules = answer(model), dict(model.named_modules())
    found = compress.feed_forward(model, IDS, method=compress.Bits(8, 6, 0.25))
    assert [row.formula for row in found.layers] == [formula] * 2
    assert found.layers[0].name == name
    assert found.skipped == []
    after = answer(model)
    off = float((after - before).norm() / before.norm())
    assert 0 < off < 0.02, off
    assert found.distance >= 0
    # 8 and 6 bits, and half a bit of scales, of 32: biases are more of so small a layer.
    assert 0.2 < found.bytes / found.bytes_before < 0.25
    split = [m for m in model.modules() if isinstance(m, compress.SplitLinear)]
    stored = [t for m in split for t in (*m.parameters(), *m.buffers())]
    assert sum(t.numel() * t.element_size() for t in stored) == found.bytes
    found.remove()
    assert torch.equal(answer(model), before)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize(
    ("family", "method"),
    [("phi3", "bits"), ("phi3", "rank"), ("gpt2", "prune"), ("llama", "svd"), ("opt", "rank")],
)
def test_each_method_keeps_to_its_budget_and_says_its_error(family, method):
    model = make_model(family)
    budget = 0.25 if method == "bits" else 0.6
    found = compress.feed_forward(model, IDS, method=method, budget=budget)
    assert {row.method for row in found.layers} <= {method, "whole"}
    assert 0.5 * budget < found.bytes / found.bytes_before <= budget
    assert {row.name for row in found.methods} >= {"bits", "prune", "svd", method}
    assert [row.name for row in found.methods if row.chosen] == [method]
    measured = next(row.error for row in found.methods if row.chosen)
    assert sum(row.error for row in found.layers) / 2 == pytest.approx(measured, rel=1e-6)
    assert f"→ {method}" in found.table()


def test_heavy_neurons_are_worth_their_bits():
    model = llama()
    near = compress.feed_forward(model, IDS, method=compress.Bits(4, 3, 0.25, fit=False))
    near.remove()
    four, three, split = (
        (r := compress.feed_forward(model, IDS, method=one), r.remove())[0]
        for one in (compress.Bits(4, 4), compress.Bits(3, 3), compress.Bits(4, 3, 0.25))
    )
    assert split.bytes == near.bytes
    assert split.distance < 0.8 * near.distance
    assert four.distance < split.distance < three.distance
    back = (three.distance - split.distance) / (three.distance - four.distance)
    assert back > 0.75


def test_a_fit_that_is_no_better_on_other_rows_is_not_kept(monkeypatch):
    real = builder.fit_codes

    def wild(weight, moment, widths):
        return [(codes, 2 * scales) for codes, scales in real(weight, moment, widths)]

    near = compress.feed_forward(llama(), IDS, method=compress.Bits(4, 3, fit=False))
    monkeypatch.setattr(builder, "fit_codes", wild)
    found = compress.feed_forward(llama(), IDS, method=compress.Bits(4, 3))
    assert [row.error for row in found.layers] == [row.error for row in near.layers]


def test_auto_is_never_further_than_the_best_of_the_others(tmp_path):
    found = compress.feed_forward(llama(), IDS, method="auto", budget=0.3)
    assert {row.name for row in found.methods} == {"bits", "prune", "rank", "svd", "mixed"}
    assert found.distance == min(row.distance for row in found.methods)
    assert all(row.bytes <= 0.3 * found.bytes_before for row in found.methods)
    assert json.loads(json.dumps(found.to_dict()))["bytes"] == found.bytes
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5000


def test_a_budget_of_one_changes_nothing():
    model = llama()
    modules = dict(model.named_modules())
    found = compress.feed_forward(model, IDS, method="auto", budget=1.0)
    assert dict(model.named_modules()) == modules
    assert (found.distance, {row.method for row in found.layers}) == (0, {"whole"})


def test_recovery_brings_the_layers_nearer_on_rows_it_has_not_seen():
    for method, budget in (("prune", 0.6), ("rank", 0.6), (compress.Bits(2, 2), None)):
        plain, recovered = (
            compress.feed_forward(llama(), IDS, method=method, budget=budget, recover=steps) for steps in (0, 30)
        )
        for one, other in zip(plain.layers, recovered.layers, strict=True):
            assert other.error < 0.95 * one.error
            assert other.bytes == one.bytes
        assert recovered.distance < plain.distance


def test_modes_gradients_and_the_cache_stay_as_they_were():
    model = llama().train()
    model.model.layers[0].eval()
    for parameter in model.model.layers[1].mlp.parameters():
        parameter.requires_grad_(False)
    compress.feed_forward(model, IDS, method="prune", budget=0.5)
    assert [layer.mlp.down_proj.training for layer in model.model.layers] == [False, True]
    assert [layer.mlp.down_proj.weight.requires_grad for layer in model.model.layers] == [True, False]
    assert model.training
    assert model.config.use_cache


def test_the_order_of_neurons_does_not_matter():
    model, other = llama(), llama()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    for layer in other.model.layers:
        for name in ("gate_proj", "up_proj"):
            weight = getattr(layer.mlp, name).weight
            weight.data = weight.data[order]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, order].contiguous()
    both = [compress.feed_forward(m, IDS, method="prune", budget=0.5) for m in (model, other)]
    assert [row.heavy for row in both[0].layers] == [row.heavy for row in both[1].layers]
    torch.testing.assert_close(answer(model), answer(other))


def test_a_compressed_model_fuses_trains_and_takes_adapters():
    peft = pytest.importorskip("peft")
    model = llama()
    compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    model.train()
    with tigon.fuse(model):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert float(model.model.layers[0].self_attn.q_proj.weight.grad.norm()) > 0
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert sum(p.requires_grad for p in adapted.parameters()) == 8
    adapted(input_ids=IDS, labels=IDS).loss.backward()


# ---------------------------------------------------------------------------------------------------------- skipped


def test_shared_layers_are_skipped_and_named():
    model = llama()
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    with pytest.raises(ValueError, match=r"no feed-forward layer that can be compressed \(model.layers.0.mlp: .*tied"):
        compress.feed_forward(model, IDS, budget=0.5)
    model = llama(num_hidden_layers=3)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    found = compress.feed_forward(model, IDS, budget=0.3)
    assert [row.name for row in found.layers] == ["model.layers.2.mlp"]
    assert [(one.name, "shared" in one.reason) for one in found.skipped] == [("model.layers.0.mlp", True)]


def test_adapters_hooks_and_what_was_compressed_before_are_skipped_and_named():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["up_proj"], layers_to_transform=[1]))
    found = compress.feed_forward(adapted, IDS, budget=0.3)
    assert [row.name for row in found.layers] == ["base_model.model.model.layers.0.mlp"]
    assert "has an adapter" in found.skipped[0].reason
    model = llama()
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)
    found = compress.feed_forward(model, IDS, budget=0.3)
    assert [one.reason for one in found.skipped] == ["the layer has hooks"]
    with pytest.raises(ValueError, match="already compressed"):
        compress.feed_forward(model, IDS, budget=0.3)


class Quantised(nn.Linear):
    """As other libraries' layers: a class of its own."""


def test_other_classes_other_activations_and_experts_are_skipped_and_named():
    model = llama(num_hidden_layers=3)
    one = model.model.layers[0].mlp
    one.up_proj = copy.copy(one.up_proj)
    one.up_proj.__class__ = Quantised
    model.model.layers[1].mlp.act_fn = nn.Hardswish()
    model.model.layers[2].self_attn.experts = nn.ParameterDict({"down": nn.Parameter(torch.randn(4, 2, 3))})
    found = compress.feed_forward(model, IDS, budget=0.3)
    reasons = {row.name: row.reason for row in found.skipped}
    assert "Quantised" in reasons["model.layers.0.mlp"]
    assert "not an activation of earlier layers (silu" in reasons["model.layers.1.mlp.down_proj"]
    assert "4 experts" in reasons["model.layers.2.self_attn.experts"]


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": 1.4}, r"budget must be a fraction of the .* present bytes, above 0 and at most 1, got 1.4\."),
        ({"budget": 0}, "budget must be a fraction"),
        ({}, "budget must be a fraction of the .* present bytes, .* got None"),
        ({"budget": float("nan")}, "budget must be a fraction"),
        ({"budget": 0.01}, r"budget must be at least 0\.0\d+ for bits, which cannot make the layers smaller, got 0.01"),
        ({"budget": 0.5, "method": "bit"}, r"method must be one of bits, .*, got 'bit'; did you mean 'bits'\?"),
        ({"budget": 0.5, "method": compress.Bits()}, r"budget must be left out when method is Bits\(…\), got 0.5"),
        ({"budget": 0.5, "recover": -1}, "recover must be a step count, 0 or more, got -1"),
    ],
)
def test_options_out_of_range_get_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        compress.feed_forward(llama(), IDS, **options)
    with pytest.raises(ValueError, match=r"Bits: heavy must be one of 2, 3, 4, 5, 6, 8, got 7"):
        compress.Bits(7, 3)
    with pytest.raises(ValueError, match="share must be a fraction of the neurons from 0 to 1"):
        compress.Bits(4, 3, 1.5)


def test_too_little_calibration_says_how_much_is_needed():
    model = llama()
    with pytest.raises(ValueError, match=r"64 calibration tokens are too few .* give at least 256"):
        compress.feed_forward(model, IDS[:1], budget=0.5)
    with pytest.raises(ValueError, match=r"320 tokens cannot determine .* of 128 inputs; give 512.*than rank"):
        compress.feed_forward(model, IDS[:5], method="rank", budget=0.5)
    found = compress.feed_forward(model, IDS[:5], method="auto", budget=0.5)
    assert found.notes[0].startswith("rank and svd were not tried: 320 tokens")
    for nothing in ([], torch.zeros(0, 4, dtype=torch.long)):
        with pytest.raises(ValueError, match="calibration must hold text, got none"):
            compress.feed_forward(model, nothing, budget=0.5)
    with pytest.raises(ValueError, match="pass tokenizer="):
        compress.feed_forward(model, ["text"], budget=0.5)
    with pytest.raises(ValueError, match="texts, token ids or model batches, got a list of int"):
        compress.feed_forward(model, [1, 2], budget=0.5)


@pytest.mark.parametrize("tokens", [640, 1600])
def test_a_low_rank_keeps_as_many_rows_as_it_needs(tokens, monkeypatch):
    monkeypatch.setattr(calibration, "MOST", 256)  # as 8,192 are fewer than 4 for each of 4,096 neurons
    model = llama()
    ids = torch.randint(64, (tokens // 64, 64), generator=torch.Generator().manual_seed(3))
    found, _ = find_feed_forwards(model, {"input_ids": ids[:1]})
    batches = calibration.make_batches(model, ids, None)
    for rows in calibration.record_inputs(model, found, batches, need=512).values():
        assert 512 <= len(rows) < 1024
    for rows in calibration.record_inputs(model, found, batches).values():
        assert len(rows) <= 256
    report = compress.feed_forward(model, ids, method="rank", budget=0.6)
    assert {row.method for row in report.layers} == {"rank"}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("model.layers.1.input_layernorm.weight", math.nan, r"not finite .* at model.layers.1.self_attn.q_proj"),
        ("model.layers.1.mlp.down_proj.weight", 1e6, r"weights in model.layers.1.mlp must be finite and within ±65504"),
        ("lm_head.weight", math.nan, "outputs for the calibration are not finite"),
    ],
)
def test_numbers_that_are_not_finite_are_named(name, value, sentence):
    model = llama()
    model.get_parameter(name).data.view(-1)[0] = value
    with pytest.raises(ValueError, match=sentence):
        compress.feed_forward(model, IDS, budget=0.5)


# ------------------------------------------------------------------------------------------------------------ parts


def test_low_rank_is_the_best_for_the_inputs_it_was_made_for():
    from tigon.compress.low_rank import RIDGE, Spectrum

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, generator=draw).double() * torch.logspace(0, 2, 12).double()
    moment = x.t() @ x / 200
    for shape in ((5, 12), (30, 12)):  # either Gram matrix
        w = torch.randn(*shape, generator=draw).double()
        outer, inner = Spectrum(w, moment).factors(3)
        error = (x @ (w - outer @ inner).t()).square().mean(0).sum()
        values = torch.linalg.svdvals(w @ torch.linalg.cholesky(moment))
        assert float(error) == pytest.approx(float(values[3:].square().sum()), rel=20 * RIDGE)
        plain = torch.linalg.svd(w, full_matrices=False)
        unaware = (plain.U[:, :3] * plain.S[:3]) @ plain.Vh[:3]
        assert error < 0.5 * (x @ (w - unaware).t()).square().mean(0).sum()


def test_the_plan_is_the_best_of_all_plans():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        error = torch.rand(4, 4, generator=draw)
        layers = [
            [
                Candidate("bits", 1, None, 0, n, 1 / (1 + n) + 0.01 * float(e))
                for n, e in zip((2, 5, 9, 14), row, strict=True)
            ]
            for row in error
        ]
        weights = (torch.rand(4, generator=draw) + 0.1).tolist()
        every = [
            (sum(w * c.error for w, c in zip(weights, row, strict=True)), row)
            for row in itertools.product(*layers)
            if sum(c.bytes for c in row) <= 28
        ]
        best = min(value for value, _ in every)
        chosen = plan(layers, 28, weights)
        assert sum(c.bytes for c in chosen) <= 28
        found = sum(w * c.error for w, c in zip(weights, chosen, strict=True))
        assert found <= 1.15 * best  # the price of a byte is one for all layers, which costs the last few bytes
    assert plan(layers, 7, weights) is None
    assert [c.bytes for c in plan(layers, 8, [0.0] * 4)] == [2] * 4
    layers[1][2] = Candidate("bits", 1, None, 0, 9, math.nan)
    with pytest.raises(ValueError, match=r"errors must be finite, got .* for layer 1"):
        plan(layers, 28, weights)


def test_scores_name_the_neurons_that_move_the_output():
    model = llama()
    (one, _), _ = find_feed_forwards(model, {"input_ids": IDS[:1]})
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    layer = Layer(model, one, x)
    alone = [layer.h_held[:, [i]] @ layer.down[:, [i]].t() for i in range(128)]
    size = torch.tensor([float(y.norm()) for y in alone])
    assert float(size[:32].sum() / size.sum()) > 0.6
    assert torch.corrcoef(torch.stack((size, torch.arange(128.0))))[0, 1] < -0.6


def test_an_output_that_cannot_be_iterated_is_read_by_its_logits():
    class Model(nn.Module):
        def forward(self, x):
            return argparse.Namespace(logits=x)

    assert calibration.OutputDistance(Model(), [{"x": torch.ones(2, 4)}]).measure() == 0
