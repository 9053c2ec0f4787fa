"""Packed rows: what the collator makes, what it refuses, and the losses and gradients of samples one by one."""

import random

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import transformers
import trl_cases as cases
from torch.nn.functional import cross_entropy

import tigon
from tigon.integrations.packing import PackedDataset, PackingCollator, measure_padding, pack_best_fit

pytestmark = pytest.mark.filterwarnings("ignore")


def samples(count=24, seed=0):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [draw.randrange(1, 300) for _ in range(draw.randrange(2, 14))]
        prompt = draw.randrange(len(ids) + 1)
        rows.append({"input_ids": ids, "completion_mask": [0] * prompt + [1] * (len(ids) - prompt)})
    return rows


def test_best_fit():
    assert pack_best_fit([5, 3, 0, 4, 2, 2, 8], 8) == [[6], [0, 1], [3, 4, 5]]
    draw = random.Random(1)
    lengths = [min(2048, int(draw.lognormvariate(5.7, 0.9))) for _ in range(2000)]
    packs = pack_best_fit(lengths, 2048)
    assert sorted(i for pack in packs for i in pack) == [i for i, n in enumerate(lengths) if n]
    assert all(sum(lengths[i] for i in pack) <= 2048 for pack in packs)
    assert len(packs) <= 1.01 * -(-sum(lengths) // 2048)
    assert measure_padding([3, 1, 2, 2], 2) == 1 - 8 / 10


def test_a_batch():
    rows = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}, {"input_ids": [4, 5, 6, 7], "seq_lengths": [2, 2]}]
    batch = PackingCollator()(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 7]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    collate = PackingCollator(max_tokens=[16], pad_to_budget=True)
    collate(rows)
    assert collate.tokens == {"real": 7, "padded": 9, "computed": 16}


def test_constant_shapes():
    collate = PackingCollator(max_tokens=16, pad_to_budget=True, max_documents=5, pad_token_id=9)
    for rows in (samples(1), [{"input_ids": [1] * 8}, {"input_ids": [2] * 8, "labels": [-100] * 8}]):
        batch = collate(rows)
        assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 16)
        assert batch["cu_seq_lens_q"].shape == (6,)
        assert batch["cu_seq_lens_q"][-1] == 16
        assert batch["max_length_q"] == 16
    batch = collate([{"input_ids": [1, 2, 3]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 16, 16, 16, 16]
    assert batch["input_ids"][0, 3:].tolist() == [9] * 13
    assert (batch["labels"][0, 3:] == -100).all()
    collate = PackingCollator(max_tokens=[32, 8, 16], pad_to_budget=True)
    assert [collate([{"input_ids": [1] * n}])["input_ids"].shape[1] for n in (3, 8, 9, 32)] == [8, 8, 16, 32]
    assert PackingCollator(max_tokens=8, pad_to_budget=True)([{"input_ids": [1]}])["cu_seq_lens_q"].shape == (65,)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"input_ids": [1, 2, 3]}], {"max_tokens": 2}, "has 3 tokens, more than max_tokens=2"),
        ([{"input_ids": []}], {}, "no tokens"),
        ([{"input_ids": [1]}] * 3, {"max_documents": 2}, "3 samples, padding included, more than max_documents=2"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], {}, "an attention_mask with zeros"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "2 input_ids, but labels of shape"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], {}, "seq_lengths sum to 1"),
        ([{"input_ids": [1, 2], "position_ids": [3, 4]}], {}, "do not begin at 0"),
        ([{"input_ids": [[1, 2], [3]], "completion_mask": [[0, 1], [1]]}], {}, "cannot have completion_mask"),
        ([{"input_ids": [1, 2], "pixel_values": [0]}], {}, "pixel_values, which a packed row cannot carry"),
    ],
)
def test_batches_that_are_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator(**options)(rows)


def test_rows_of_several_samples_are_cut_to_the_budget():
    (row,) = PackedDataset([{"input_ids": range(1, 13), "seq_lengths": [5, 7]}], 8, truncate=True)
    assert [len(ids) for ids in row["input_ids"]] == [len(labels) for labels in row["labels"]] == [5, 3]
    rows = PackedDataset([{"input_ids": [1, 2, 3, 4]}] * 3, 8)
    with pytest.raises(ValueError, match="sample 0 has 8 tokens, more than max_tokens=7"):
        PackedDataset(rows, 7)


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="needs max_tokens"):
        PackingCollator(pad_to_budget=True)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got \\[\\]"):
        PackingCollator(max_tokens=[])
    with pytest.raises(ValueError, match="max_documents must be at least 1, got 0"):
        PackingCollator(max_documents=0)
    with pytest.raises(ValueError, match="sample 1 has 3 tokens, more than max_tokens=2; truncate=True"):
        PackedDataset([{"input_ids": [1]}, {"input_ids": [1, 2, 3]}], 2)
    with pytest.raises(ValueError, match="rows must have tokens"):
        PackedDataset([{"input_ids": []}], 2)
    with pytest.raises(ValueError, match="sample 0 has text, which a packed row cannot carry"):
        PackedDataset([{"input_ids": [1], "text": "a"}], 2)
    (item,) = PackedDataset([{"input_ids": [1, 2, 3]}], 2, truncate=True)
    assert item == {"input_ids": [[1, 2]], "labels": [[1, 2]]}


@pytest.mark.parametrize("fused", [False, True])
def test_the_trainer_equals_samples_one_by_one(fused, tmp_path):
    """Two micro-batches a step, one of them with a row that has no label at all."""
    rows = [*samples(), {"input_ids": [5, 6, 7], "labels": [-100] * 3}, {"input_ids": []}]
    packed = PackedDataset(rows, 32)
    assert len(packed) < len(rows) / 2
    assert "26 samples" not in repr(packed)
    assert f"{len(rows) - 1} samples in {len(packed)} rows of 32 tokens" in repr(packed)
    model = cases.model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if fused:
        tigon.fuse(model)
    args = transformers.TrainingArguments(
        str(tmp_path),
        **{
            **cases.COMMON,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": len(packed),
            "max_steps": 1,
        },
    )
    collate = PackingCollator(max_tokens=32, pad_to_budget=True)
    trainer = transformers.Trainer(model, args, train_dataset=packed, data_collator=collate)
    loss = trainer.train().training_loss
    plain = cases.model()
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor(row.get("labels", row["input_ids"]))
        if "completion_mask" in row:
            labels = labels.masked_fill(torch.tensor(row["completion_mask"]) == 0, -100)
        if ids.numel() and (labels[1:] != -100).any():
            logits = plain(ids, use_cache=False).logits[0, :-1]
            total = total + cross_entropy(logits, labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    for name, p in plain.named_parameters():
        step = weights[name] - cases.COMMON["learning_rate"] * p.grad
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), step, rtol=1e-4, atol=1e-6)


def test_a_batch_without_labels_has_no_loss(tmp_path):
    model = cases.model()
    tigon.fuse(model)
    batch = PackingCollator()([{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    outputs = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(4))
    outputs.loss.backward()
    assert outputs.loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
