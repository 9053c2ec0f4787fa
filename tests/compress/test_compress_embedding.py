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
    found = compress.embeddings(model)
    assert found.bytes == 50 * 34
    assert found.bytes_before == 50 * 120
    codes, scales = tigon.quantize_rows(table)
    rows = tigon.quantized_embedding(codes, scales, ids.reshape(-1, 1)).view(3, 7, 30)
    assert torch.equal(model[0](ids), rows)
    step = scales[:, :1].float()
    assert ((model[0].weight - table).abs() <= 0.501 * step + 1e-6).all()
    assert found.layers[0].error < 1e-4
    assert copy.deepcopy(model).half()(ids).dtype == torch.float16
    found.remove()
    assert torch.equal(model(ids), before)


def test_tied_special_and_unfit_tables_are_left_and_named():
    model = llama(tie_word_embeddings=True)
    found = compress.embeddings(model)
    assert found.layers == []
    assert [(one.name, "tied" in one.reason) for one in found.left] == [("model.embed_tokens", True)]
    assert model.lm_head.weight is model.model.embed_tokens.weight

    class Scaled(nn.Embedding):
        """Reads its rows in its own way."""

    model = nn.ModuleDict({"a": nn.Embedding(4, 2), "b": Scaled(4, 2), "c": nn.Embedding(4, 2, max_norm=1.0)})
    found = compress.embeddings(model)
    assert [row.name for row in found.layers] == ["a"]
    assert {one.name: one.reason.split()[3] for one in found.left} == {"b": "Scaled,", "c": "rows,"}


def test_bad_tables_and_widths_get_a_sentence():
    with pytest.raises(ValueError, match=r"bits must be 8, .* got 4"):
        compress.embeddings(llama(), bits=4)
    model = llama()
    model.model.embed_tokens.weight.data[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"table model.embed_tokens must be finite"):
        compress.embeddings(model)
    with pytest.raises(ValueError, match=r"must have an nn.Embedding, got none"):
        compress.embeddings(nn.Linear(2, 2))


def test_a_language_model_hardly_moves():
    model = llama()
    before = answer(model)
    compress.embeddings(model)
    off = float((answer(model) - before).norm() / before.norm())
    assert 0 < off < 0.01
    assert model(IDS).logits.requires_grad
