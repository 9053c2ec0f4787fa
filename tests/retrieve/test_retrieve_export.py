"""An encoder and a search of an index as one exported program, which finds what the index finds."""

import io
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import tigon
from tigon.retrieve import Category, Index, Schema, searching

D, ITEMS, K = 16, 500, 7
WHERE = "kind == 'a'"


class Searcher(nn.Module):
    """Features to scores and ids; k and filter are fixed."""

    def __init__(self, encoder, index, k, where=None):
        super().__init__()
        self.encoder, self.k, end = encoder, k, index.rows.end
        self.where = None if where is None else searching.compiled(index, where).filter
        for name in ("embeddings", "item_ids"):
            self.register_buffer(name, getattr(index, name)[:end].clone())
        self.register_buffer("attributes", index.attributes[:, :end].clone())
        self.register_buffer("live", index.live[: (end + 31) // 32].clone())

    def forward(self, features):
        query = self.encoder(features)
        attributes = None if self.where is None else self.attributes
        scores, rows = tigon.filtered_topk(
            query, self.embeddings, self.k, attributes=attributes, where=self.where, live=self.live
        )
        return scores, torch.where(rows >= 0, self.item_ids[rows.clamp(min=0)], -1)


@pytest.fixture
def made():
    draw = np.random.default_rng(0)
    index = Index(D, ITEMS, "float32", schema=Schema(kind=Category()))
    vectors = torch.from_numpy(draw.standard_normal((ITEMS, D), dtype=np.float32))
    index.upsert(np.arange(ITEMS) + 1000, vectors, {"kind": draw.choice(["a", "b"], ITEMS)})
    index.delete(np.arange(1000, 1100))
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, D)).eval(), index


@pytest.mark.parametrize("where", [None, WHERE])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_program_that_was_saved_finds_what_the_index_finds(made, where, dynamic):
    encoder, index = made
    shapes = ({0: torch.export.Dim("queries", min=1, max=64)},) if dynamic else None
    with torch.no_grad():
        program = torch.export.export(Searcher(encoder, index, K, where), (torch.randn(5, 8),), dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for B in (5, 1, 33) if dynamic else (5,):
            features = torch.randn(B, 8)
            scores, ids = loaded(features)
            hits = index.search(encoder(features), K, where)
            assert torch.equal(ids, hits.ids)
            assert torch.allclose(scores, hits.scores, rtol=1e-5, atol=1e-5)


# In a process of its own: where torch's loader fails, it ends the process.
LOADED = """
import sys
import torch

features = torch.load(sys.argv[2])
torch.save(torch._inductor.aoti_load_package(sys.argv[1])(features), sys.argv[3])
"""
CRASHES = torch.version.cuda is not None and torch.__version__.startswith("2.11.")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.skipif(CRASHES, reason="torch 2.11 with CUDA crashes when it loads a package for the CPU")
def test_a_package_of_aotinductor_finds_what_the_index_finds(made, tmp_path):
    encoder, index = made
    with torch.no_grad():
        program = torch.export.export(Searcher(encoder, index, K, WHERE), (torch.randn(5, 8),))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "search.pt2"))
        features = torch.randn(5, 8)
        torch.save(features, tmp_path / "features.pt")
        files = path, str(tmp_path / "features.pt"), str(tmp_path / "answer.pt")
        subprocess.run([sys.executable, "-c", LOADED, *files], check=True)
        scores, ids = torch.load(files[-1])
        hits = index.search(encoder(features), K, WHERE)
        assert torch.equal(ids, hits.ids)
        assert torch.allclose(scores, hits.scores, rtol=1e-5, atol=1e-5)
