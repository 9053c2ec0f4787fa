"""Compressed models on disk: they open without the original weights, and give the same bits."""

import json
import subprocess
import sys

import pytest
import torch
from compress_made import FAMILIES, IDS, answer, llama
from torch import nn

from tigon import compress
from tigon.compress.layers import SplitLinear
from tigon.compress.saving import layout

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.mark.parametrize(
    ("family", "method", "budget"),
    [("phi3", "rank", 0.6), ("phi3", "prune", 0.6), ("bert", "bits", 0.2), ("gpt2", "prune", 0.6)],
)
def test_a_model_opens_as_it_was_saved(family, method, budget, tmp_path):
    model = FAMILIES[family][0]()
    compress.feed_forward(model, IDS, method=method, budget=budget)
    compress.save(model, tmp_path / "small")
    opened = compress.load(tmp_path / "small")
    assert torch.equal(answer(opened), answer(model))
    assert layout(opened) == layout(model)
    # Dense: without Tigon, by transformers alone, with the shapes that the configuration tells.
    dense = compress.load(tmp_path / "small", dense=True)
    assert not any(isinstance(m, SplitLinear) for m in dense.modules())
    torch.testing.assert_close(answer(dense), answer(model))
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(answer(again), answer(dense))


def test_save_pretrained_is_enough_and_another_process_opens_it(tmp_path):
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").eval()
    compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    compress.embeddings(model)
    model.save_pretrained(tmp_path / "small")
    torch.save(answer(model), tmp_path / "answer.pt")
    code = f"""
import torch
from tigon import compress
model = compress.load({str(tmp_path / "small")!r})
ids = torch.tensor({IDS[:2].tolist()})
assert model.dtype == torch.bfloat16
with torch.no_grad():
    assert torch.equal(model(ids)[0], torch.load({str(tmp_path / "answer.pt")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    size = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "small")}
    assert size["small"] < 0.6 * size["whole"]


class Own(nn.Module):
    """No model of transformers: a layer with a residual, and a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, input_ids):
        x = self.table(input_ids)
        return x + self.down(torch.relu(self.up(x)))


def test_a_module_of_your_own_is_saved_and_loaded_into_a_new_one(tmp_path):
    torch.manual_seed(0)
    model, ids = Own(), torch.randint(50, (8, 40))
    found = compress.feed_forward(model, ids, method=compress.Bits(6, 4))
    assert found.unit == "of the mean square of its answers"
    compress.embeddings(model)
    compress.save(model, tmp_path)
    opened = compress.load(tmp_path, Own())
    assert torch.equal(opened(ids), model(ids))
    compress.widen(opened)
    assert type(opened.down) is nn.Linear
    torch.testing.assert_close(opened(ids), model(ids))
    other = Own()
    del other.down
    with pytest.raises(ValueError, match="names a layer down, which the model does not have"):
        compress.load(tmp_path, other)


def test_folders_that_are_not_compressed_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="nothing in the model is compressed"):
        compress.save(llama(), tmp_path)
    with pytest.raises(ValueError, match=r"has no config.json; give model="):
        compress.load(tmp_path)
    with pytest.raises(ValueError, match=r"has no compress.json"):
        compress.load(tmp_path, Own())
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not compressed by Tigon; open it by from_pretrained"):
        compress.load(tmp_path)


def test_the_way_back_leaves_no_trace_in_the_configuration():
    model = llama()
    before = model.config.to_dict()
    found = compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    assert model.config.to_dict() != before
    found.remove()
    assert model.config.to_dict() == before
    with pytest.raises(RuntimeError, match=r"forget\(\) was called"):
        found.remove()


def test_casts_of_a_model_do_not_round_its_scales():
    model = llama()
    compress.feed_forward(model, IDS, method=compress.Bits(4, 3))
    layer = model.model.layers[0].mlp.down_proj
    before = layer.weight
    model.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(layer.weight, before)
    assert model.to(torch.bfloat16).model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16


def test_the_report_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = compress.feed_forward(llama(), IDS, method="auto", budget=0.3)
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5000
    assert json.loads(json.dumps(found.to_dict()))["bytes"] == found.bytes
