"""What the report says: of parts that did not run, of calls of the backbone alone, and of models without a head."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from test_families import CALLS  # noqa: E402
from zoo import BASE, batch, build  # noqa: E402


def row_of(report, kind):
    return next(row for row in report.rows if row.kind == kind)


# --------------------------------------------------------------------------------------------- which call is a step


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_call_of_the_backbone_alone_is_a_step(family):
    model, inputs = build(family), batch(family)
    labels = inputs.pop("labels")
    backbone = getattr(model, model.base_model_prefix)
    layers = {kind: n for kind, n in CALLS[family].items() if kind != "head"}
    with tigon.fuse(model) as fusion:
        for _ in range(2):
            hidden = backbone(**inputs).last_hidden_state
            loss = tigon.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, labels[:, 1:])
            loss.backward()
            assert fusion.report().calls == layers
        model(**inputs, labels=labels).loss.backward()
        assert fusion.report().calls == CALLS[family], "a whole step begins anew"
        backbone(**inputs)
        assert fusion.report().calls == layers
        assert fusion.report().steps == 4
    torch.testing.assert_close(model(**inputs, labels=labels).loss, loss)


def test_the_backbone_of_a_copy_is_its_own():
    import copy

    model, inputs = build("llama"), batch("llama")
    inputs.pop("labels")
    with tigon.fuse(model) as fusion:
        twin = copy.deepcopy(model)
        twin.model(**inputs)
        assert fusion.report().steps == 0
        assert vars(twin)["_tigon_fusion"].report().calls["norm"] == 5
    assert "forward" not in vars(model.model)


def test_calls_of_single_parts_belong_to_no_step():
    model, inputs = build("llama"), batch("llama")
    with tigon.fuse(model) as fusion:
        model.model.norm(torch.randn(2, 3, 32))
        assert "No step has run yet." in str(fusion.report())
        assert "not counted: 1 call of a part." in str(fusion.report())
        model(**inputs)
        model.model.norm(torch.randn(2, 3, 32))
        assert fusion.report().calls == CALLS["llama"]
        assert fusion.report().outside == 1


# -------------------------------------------------------------------------------------------- why a part did not run


def test_a_head_without_labels_says_so():
    model, inputs = build("llama"), batch("llama")
    labels = inputs.pop("labels")
    with tigon.fuse(model) as fusion:
        logits = model(**inputs).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        head = row_of(fusion.report(), "head")
        assert head.calls == 0
        assert head.idle.startswith("the model was called without labels")
        assert f"Did not run: {head.idle}" in str(fusion.report())
        model(**inputs, labels=labels)
        assert row_of(fusion.report(), "head").idle == ""


def test_a_module_that_is_not_called_says_so():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.spare = nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-6)

        def forward(self, x):
            return self.norm(x)

    model = Model()
    with tigon.fuse(model) as fusion:
        assert [row.idle for row in fusion.report().fused_rows] == ["", ""], "before the first step nothing is said"
        model(torch.randn(2, 3, 16))
        idle = {row.name: row.idle for row in fusion.report().fused_rows}
    assert idle == {"LayerNorm": "", "RMSNorm": "the model did not call it"}


def test_autocast_that_runs_a_norm_in_fp32_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x):
            return self.norm(self.linear(x))

    model = Model()
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with tigon.fuse(model) as fusion:
            assert torch.equal(model(x), plain)
            assert row_of(fusion.report(), "norm").idle == "autocast runs it in fp32 on bfloat16 inputs"
            fp32 = model.norm(x)
    assert fp32.dtype == torch.float32


def test_without_gradients_the_layers_of_one_input_say_so():
    model, inputs = build("llama"), batch("llama")
    with tigon.fuse(model) as fusion, torch.no_grad():
        model(**inputs)
        assert row_of(fusion.report(), "linear").idle.startswith("no gradients were recorded")


# ------------------------------------------------------------------------------------------- models without a head


def vision():
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2
    )
    return transformers.ViTForImageClassification(config)


def sequences():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**BASE, num_labels=1))


def bert():
    sizes = {k: BASE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_attention_heads=4))


@pytest.mark.parametrize(("make", "outputs"), [(vision, 2), (sequences, 1), (bert, 2)])
def test_the_head_of_a_classifier_has_a_row_that_asks_for_nothing(make, outputs):
    with tigon.fuse(make()) as fusion:
        (row,) = (row for row in fusion.report().rows if row.kind == "head")
        assert row.what == f"its logits cost nothing: {outputs} for each input, and none over a vocabulary"
        assert (row.fused, row.count, row.advice) == (False, 1, "")
        assert "linear_cross_entropy" not in str(fusion.report())


def test_models_without_a_head_have_no_row_of_one():
    for make in (lambda: sequences().model, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))):
        with tigon.fuse(make()) as fusion:
            assert not [row for row in fusion.report().rows if row.kind == "head"]


def test_a_language_head_that_nothing_returns_has_a_row_with_advice():
    model = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50))
    with tigon.fuse(model) as fusion:
        (row,) = (row for row in fusion.report().skipped_rows if row.kind == "head")
    assert row.name == "Linear"
    assert "tigon.linear_cross_entropy" in row.advice


# --------------------------------------------------------------------------------------------------- losses elsewhere


def test_a_library_that_computes_the_loss_itself_is_named_once():
    """TRL calls the model without labels; here a function whose globals say that it is TRL's."""
    scope = {"__name__": "trl.trainer.some_trainer"}
    exec("def compute_loss(model, inputs):\n    return model(**inputs).logits.float().mean()", scope)
    model, inputs = build("llama"), batch("llama")
    inputs.pop("labels")
    with tigon.fuse(model):
        with pytest.warns(UserWarning, match=r"tigon.integrations.trl.fuse\(trainer\)"):
            scope["compute_loss"](model, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scope["compute_loss"](model, inputs)
    with tigon.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)


# ------------------------------------------------------------------------------------------------- why, for one module


class NormByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return F.normalize(x, dim=-1) * 4 * self.weight


def test_explain_tells_the_formulas_that_were_tried():
    model = nn.Sequential(NormByHand(), nn.LayerNorm(16), nn.Linear(16, 16))
    with tigon.fuse(model) as fusion:
        left = fusion.explain("0")
        (verdict,) = left.verdicts
        assert (left.module, left.replaced, verdict.kind, verdict.recognised) == ("NormByHand", [], "norm", False)
        assert verdict.advice
        nearest = verdict.trials[0]
        assert nearest.formula.startswith("x / rms(x) · w")
        assert nearest.formula.endswith("eps 0.0")
        assert "infinite and NaN" in nearest.inputs, "a row of zeros is 0, and not NaN"
        assert nearest.agreed > verdict.trials[-1].agreed
        text = str(left)
        assert text.startswith("0 (NormByHand): not fused\n  norm: ")
        assert nearest.inputs in text
        fused = fusion.explain("1")
        assert (fused.replaced, fused.verdicts[0].recognised) == (["norm"], True)
        assert "it computes (x − mean) / std · w + b, rounded once" in str(fused)
        assert str(fusion.explain("2")) == "2 (Linear): not fused"
        with pytest.raises(ValueError, match=r"explain: name must be a module of Sequential, got '7'"):
            fusion.explain("7")
    assert left.to_dict()["verdicts"][0]["trials"][0]["formula"] == nearest.formula


def test_explain_of_an_mlp_names_its_activation_and_the_nearest_name():
    model = build("llama")
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    with tigon.fuse(model) as fusion:
        assert "it computes silu(gate) · up" in str(fusion.explain("model.layers.0.mlp"))
        (verdict,) = fusion.explain("model.layers.1.mlp").verdicts
        assert "Tanh" in verdict.what
        assert {trial.formula for trial in verdict.trials} >= {"silu(gate) · up", "relu(gate) · up"}
        with pytest.raises(ValueError, match=r"did you mean 'model.layers.0.mlp'"):
            fusion.explain("model.layers.0.mlpp")
