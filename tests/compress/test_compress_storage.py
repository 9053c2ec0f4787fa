"""Compressed models on disk: they open without the original weights, and give the same bits."""

import json
import sys

import pytest
import torch
from compress_made import IDS, answer, llama, make_model
from torch import nn

from tigon import compress
from tigon.compress.layout import METHOD, get_layout

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.mark.parametrize(
    ("family", "method", "budget"),
    [("phi3", "rank", 0.6), ("phi3", "prune", 0.6), ("bert", "bits", 0.2), ("gpt2", "prune", 0.6)],
)
def test_a_model_opens_as_it_was_saved(family, method, budget, tmp_path):
    model = make_model(family)
    compress.feed_forward(model, IDS, method=method, budget=budget)
    compress.save(model, tmp_path / "small")
    opened = compress.load(tmp_path / "small")
    assert torch.equal(answer(opened), answer(model))
    assert get_layout(opened) == get_layout(model)
    # Dense: without Tigon, by transformers alone, with the shapes that the configuration tells.
    dense = compress.load(tmp_path / "small", dense=True)
    assert not any(isinstance(m, compress.SplitLinear) for m in dense.modules())
    torch.testing.assert_close(answer(dense), answer(model))
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(answer(again), answer(dense))


def test_save_pretrained_is_enough_and_load_registers_the_method(tmp_path, monkeypatch):
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").eval()
    compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    compress.embeddings(model)
    model.save_pretrained(tmp_path / "small")
    size = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "small")}
    assert size["small"] < 0.6 * size["whole"]
    # As in a process that has not imported the quantizer.
    auto = transformers.quantizers.auto
    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(table, METHOD, raising=False)
    monkeypatch.delitem(sys.modules, "tigon.compress.quantizer", raising=False)
    opened = compress.load(tmp_path / "small")
    assert opened.dtype == torch.bfloat16
    assert torch.equal(answer(opened), answer(model))


class Own(nn.Module):
    """No model of transformers: a layer with a residual, a table, and a second name for one of its weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.again = self.head

    def forward(self, input_ids):
        x = self.table(input_ids)
        return self.again(x + self.down(torch.relu(self.up(x))))


def test_a_module_of_your_own_is_saved_and_loaded_into_a_new_one(tmp_path):
    torch.manual_seed(0)
    model, ids = Own(), torch.randint(50, (8, 40))
    report = compress.feed_forward(model, ids, method=compress.Bits(6, 4))
    assert report.unit == "times the mean square output"
    compress.embeddings(model)
    compress.save(model, tmp_path)
    opened = compress.load(tmp_path, Own())
    assert torch.equal(opened(ids), model(ids))
    compress.dequantize(opened)
    assert type(opened.down) is nn.Linear
    torch.testing.assert_close(opened(ids), model(ids))
    other = Own()
    del other.down
    with pytest.raises(ValueError, match="names a layer down, which the model does not have"):
        compress.load(tmp_path, other)


def test_folders_that_are_not_compressed_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="the model has no compressed layers"):
        compress.save(Own(), tmp_path)
    with pytest.raises(ValueError, match=r"has no config.json; pass model="):
        compress.load(tmp_path)
    with pytest.raises(ValueError, match=r"has no compress.json"):
        compress.load(tmp_path, Own())
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not compressed by Tigon; use from_pretrained"):
        compress.load(tmp_path)


def test_casts_keep_the_scales_and_removal_leaves_no_trace():
    model = llama()
    before = model.config.to_dict()
    report = compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    assert model.config.to_dict() != before
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight
    model.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(layer.weight, weight)
    assert model.to(torch.bfloat16).model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    report.remove()
    assert model.config.to_dict() == before
    with pytest.raises(RuntimeError, match=r"forget\(\) was called"):
        report.remove()
