"""sentence-transformers' trainer with Tigon's losses: losses, gradients and saved models are the library's own."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
st = pytest.importorskip("sentence_transformers", minversion="6.0")

from sentence_transformers.sentence_transformer import losses as library  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from sentence_transformers.util import dot_score, euclidean_sim  # noqa: E402

import tigon  # noqa: E402
from tigon.integrations import sentence_transformers as ours  # noqa: E402

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = {
    "default": {},
    "dot": {"similarity_fct": dot_score, "scale": 1.5},
    "symmetric": {"directions": ALL[::2], "partition_mode": "per_direction"},
    "alone": {"partition_mode": "per_direction"},
    "all": {"directions": ALL, "scale": 5.0},
}
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog"]


# The model, to losses of given embeddings.
PLAIN = torch.nn.Sequential(torch.nn.Identity())


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_and_gradients_are_the_librarys(options, columns):
    for dtype, close in ((torch.float64, 1e-9), (torch.bfloat16, 1e-2)):
        rows = [torch.randn(7, 5, dtype=dtype) for _ in range(columns)]
        found = []
        for classes in (library, ours):
            leaves = [t.clone().requires_grad_() for t in rows]
            loss = classes.MultipleNegativesRankingLoss(PLAIN, **options)
            value = loss.compute_loss_from_embeddings(leaves, None)
            found.append((value, torch.autograd.grad(value, leaves)))
        # Embeddings in bf16 have products in fp32, in the library and here: only the gradients are rounded.
        torch.testing.assert_close(found[1][0], found[0][0], rtol=min(close, 1e-5), atol=1e-7)
        torch.testing.assert_close(found[1][1], found[0][1], rtol=close, atol=close / 10)


@pytest.mark.parametrize("kind", ["default", "all"])
def test_the_cached_loss_gives_the_same_gradients(kind):
    rows = [torch.randn(7, 5, dtype=torch.float64) for _ in range(3)]
    found = []
    for classes in (library, ours):
        pieces = [[p.clone().requires_grad_() for p in t.split(3)] for t in rows]
        loss = classes.CachedMultipleNegativesRankingLoss(PLAIN, mini_batch_size=3, **OPTIONS[kind])
        value = loss.calculate_loss(pieces, None, with_backward=True)
        assert not value.requires_grad
        found.append((value, [[p.grad for p in column] for column in pieces]))
        assert loss.calculate_loss(pieces, None).detach() == value
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-10)


def test_what_only_the_library_has_is_a_sentence():
    for options, words in (
        ({"similarity_fct": euclidean_sim}, "similarity_fct must be cos_sim or dot_score"),
        ({"hardness_mode": "all_negatives", "hardness_strength": 2.0}, "hardness_mode must be None"),
    ):
        with pytest.raises(ValueError, match=f"MultipleNegativesRankingLoss: {words}"):
            ours.MultipleNegativesRankingLoss(PLAIN, **options)
    with pytest.raises(ValueError, match="two columns, got 1"):
        ours.MultipleNegativesRankingLoss(PLAIN).compute_loss_from_embeddings([torch.ones(2, 2)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny decoder with a tokenizer, as an embedding model."""
    from transformers import Qwen3Config, Qwen3Model

    from tigon.cli.tokens import train_tokenizer

    folder = tmp_path_factory.mktemp("encoder")
    train_tokenizer([" ".join(WORDS) * 20], 280).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    Qwen3Model(Qwen3Config(vocab_size=320, num_key_value_heads=2, head_dim=8, **sizes)).save_pretrained(folder)
    encoder = Transformer(str(folder))
    return st.SentenceTransformer(modules=[encoder, Pooling(32, "lasttoken")], device="cpu")


def test_a_fused_model_trains_in_the_librarys_trainer(model, tmp_path):
    """The same losses as the library's, whatever is fused, cached or not; and the model is saved whole."""
    datasets = pytest.importorskip("datasets")
    rows = {"anchor": WORDS * 2, "positive": [f"a {word}" for word in WORDS * 2]}
    found = {}
    for name, classes, options in (
        ("library", library, {}), ("fused", ours, {}), ("cached", ours, {"mini_batch_size": 3}),
    ):  # fmt: skip
        mine = copy.deepcopy(model)
        fusion = tigon.fuse(mine) if classes is ours else None
        kind = f"{'Cached' if options else ''}MultipleNegativesRankingLoss"
        args = st.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=8, logging_steps=1, use_cpu=True,
            report_to="none", save_strategy="no", learning_rate=1e-3, disable_tqdm=True,
        )  # fmt: skip
        trainer = st.SentenceTransformerTrainer(
            mine, args, train_dataset=datasets.Dataset.from_dict(rows), loss=getattr(classes, kind)(mine, **options)
        )
        trainer.train()
        found[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert found["fused"] == pytest.approx(found["library"], abs=2e-3)
    assert found["cached"] == pytest.approx(found["library"], abs=2e-3)
    assert found["library"][-1] < found["library"][0]
    report = fusion.report()
    assert not any(row.kind == "head" for row in report.rows)  # an embedding model has none, and needs none
    assert {"norm", "mlp", "qk_norm"} <= {row.kind for row in report.fused_rows}
    before = mine.encode(WORDS, convert_to_tensor=True)
    mine.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(WORDS, convert_to_tensor=True)
    torch.testing.assert_close(again, before, rtol=1e-4, atol=1e-5)
