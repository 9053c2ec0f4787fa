"""tigon.compress.embeddings: rows of bytes in the place of tables."""

import copy

import pytest
import torch
from compress_made import IDS, answer, llama
from torch import nn

import tigon
from tigon import compress


def test_tables_are_rows_of_bytes_and_come_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 30, padding_idx=0), nn.Linear(30, 4))
    with torch.no_grad():
        model[0].weight[0] = 0.5  # a padding row that is read is read as it is
    table, ids = model[0].weight.detach().clone(), torch.randint(50, (3, 7))
    ids[0, 0] = 0
    before = model(ids)
    report = compress.embeddings(model)
    assert (report.bytes, report.bytes_before) == (50 * 34, 50 * 120)
    codes, scales = tigon.quantize_rows(table)
    rows = tigon.quantized_embedding(codes, scales, ids.reshape(-1, 1)).view(3, 7, 30)
    assert torch.equal(model[0](ids), rows)
    assert ((model[0].weight - table).abs() <= 0.501 * scales[:, :1].float() + 1e-6).all()
    assert report.layers[0].error < 1e-4
    assert copy.deepcopy(model).half()(ids).dtype == torch.float16
    report.remove()
    assert torch.equal(model(ids), before)


def test_tied_and_special_tables_are_skipped_and_named():
    class Scaled(nn.Embedding):
        """Reads its rows in its own way."""

    tables = {"a": nn.Embedding(4, 2), "b": Scaled(4, 2), "c": nn.Embedding(4, 2, max_norm=1.0)}
    model = nn.ModuleDict({**tables, "d": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["d"].weight
    report = compress.embeddings(model)
    assert [row.name for row in report.layers] == ["a"]
    reasons = {row.name: row.reason for row in report.skipped}
    assert reasons.keys() == {"b", "c", "d"}
    assert all(word in reasons[name] for name, word in (("b", "Scaled"), ("c", "max_norm"), ("d", "tied")))
    assert model["head"].weight is model["d"].weight


def test_bad_tables_and_widths_get_a_sentence():
    table = nn.ModuleDict({"table": nn.Embedding(4, 2)})
    with pytest.raises(ValueError, match=r"bits must be 8, .* got 4"):
        compress.embeddings(table, bits=4)
    table["table"].weight.data[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"the table table must be finite"):
        compress.embeddings(table)
    with pytest.raises(ValueError, match=r"must have an nn.Embedding, got none"):
        compress.embeddings(nn.Linear(2, 2))


def test_a_language_model_hardly_moves():
    model = llama()
    before = answer(model)
    compress.embeddings(model)
    assert 0 < float((answer(model) - before).norm() / before.norm()) < 0.01
    assert model(IDS).logits.requires_grad
