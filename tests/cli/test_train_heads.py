"""`tigon train` for models without a language-model head: classifiers, embedding models and rerankers."""

import json
import shutil

import numpy as np
import pytest
import torch
from command import losses

for package in ("transformers", "accelerate", "datasets", "peft"):
    pytest.importorskip(package)
pytest.importorskip("trl", minversion="1.16")

from tigon.cli.problem import Problem  # noqa: E402
from tigon.cli.train.classify import MULTI, REGRESSION, SINGLE, measure  # noqa: E402

WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "yes", "no"]
FEW = ("--use_cpu", "true", "--seed", 3, "--logging_steps", 1, "--max_steps", 4, "--save_steps", 2, "--learning_rate",
       1e-3, "--per_device_train_batch_size", 4, "--disable_tqdm", "true")  # fmt: skip
HELD_OUT = ("--test_split_size", 0.25, "--eval_strategy", "steps", "--eval_steps", 4)


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def forget_end(output):
    """As a run that was killed after its first checkpoint leaves it."""
    shutil.rmtree(output / "checkpoint-4")
    (output / "model.safetensors").unlink()
    (output / "trainer_state.json").unlink()


def refuse(here, task, models, rows, options, folder, words):
    given = ("--model_name_or_path", models["encoder"], "--dataset_name", jsonl(folder / "rows.jsonl", rows))
    here("train", "--task", task, *given, "--output_dir", folder / "run", *FEW, *options).problem(words)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny encoder and a tiny decoder, with a tokenizer."""
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3ForCausalLM

    from tigon.cli.tokens import train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS) * 20], 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 320, "max_position_embeddings": 64}  # fmt: skip
    folders = {}
    for name, kind, config in (
        ("encoder", BertModel, BertConfig(**sizes)),
        ("decoder", Qwen3ForCausalLM, Qwen3Config(num_key_value_heads=2, head_dim=8, **sizes)),
    ):
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        kind(config).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def texts(label):
    rows = [f"{a} {b} {c}" for a in WORDS[:4] for b in WORDS[:3] for c in WORDS[:3]]
    return [{"text": text, "label": label(text)} for text in rows]


CLASSIFY = {
    "names": ("encoder", lambda text: "warm" if "red" in text else "cold", {0: "cold", 1: "warm"}, "accuracy"),
    "lists": ("decoder", lambda text: [w for w in WORDS[:3] if w in text], {0: "blue", 1: "green", 2: "red"}, "f1_mic"),
    "numbers": ("decoder", lambda text: text.count("red") + 0.5, {0: "label"}, "pearson"),
}


@pytest.mark.parametrize("case", CLASSIFY)
def test_a_classifier_trains_and_is_saved_with_its_labels(case, here, models, tmp_path):
    from transformers import AutoModelForSequenceClassification

    name, label, names, metric = CLASSIFY[case]
    data, output = jsonl(tmp_path / "rows.jsonl", texts(label)), tmp_path / "run"
    done = here("train", "--task", "classify", "--model_name_or_path", models[name], "--dataset_name", data,
                "--output_dir", output, *FEW, *HELD_OUT).ok()  # fmt: skip
    assert list(losses(output)) == [1, 2, 3, 4]
    assert f"its logits cost nothing: {len(names)} for each input" in done.out
    assert f"eval_{metric}" in done.out
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert model.config.id2label == names
    if case != "names":
        return
    # Resumed it ends with the same bits; and its head goes on for a data set with the same labels.
    whole, found = (output / "model.safetensors").read_bytes(), losses(output)
    forget_end(output)
    arguments = ("train", "--task", "classify", "--dataset_name", data, *FEW, *HELD_OUT)
    resume = ("--output_dir", output, "--resume_from_checkpoint", "true")
    here(*arguments, "--model_name_or_path", models[name], *resume).ok()
    assert ((output / "model.safetensors").read_bytes(), losses(output)) == (whole, found)
    here(*arguments, "--model_name_or_path", output, "--output_dir", tmp_path / "next", "--no_fuse", "--learning_rate",
         0.0).ok()  # fmt: skip
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "next")
    assert torch.equal(again.classifier.weight, model.classifier.weight)


def test_micro_batches_are_the_same_step(here, models, tmp_path):
    """The loss is the mean over a step's rows, in one piece or in two, which the Trainer alone would add up."""
    data, steps = jsonl(tmp_path / "rows.jsonl", texts(CLASSIFY["names"][1])), []
    for pieces in (1, 2):
        output = tmp_path / str(pieces)
        here("train", "--task", "classify", "--model_name_or_path", models["decoder"], "--dataset_name", data, *FEW,
             "--output_dir", output, "--per_device_train_batch_size", 4 // pieces, "--gradient_accumulation_steps",
             pieces).ok()  # fmt: skip
        steps.append([*losses(output).values()])
    assert steps[1] == pytest.approx(steps[0], abs=2e-3)


def test_adapters_of_a_classifier_come_with_its_head(here, models, tmp_path):
    from safetensors.torch import load_file

    data, output = jsonl(tmp_path / "rows.jsonl", texts(lambda text: "red" in text)), tmp_path / "run"
    here("train", "--task", "classify", "--model_name_or_path", models["decoder"], "--dataset_name", data, *FEW,
         "--output_dir", output, "--use_peft", "--lora_target_modules", "all-linear").ok()  # fmt: skip
    weights = load_file(output / "adapter_model.safetensors")
    assert sum("lora_A" in name for name in weights) == 2 * 7
    assert [name for name in weights if "score" in name]


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"text": "a", "label": 1}] * 3, (), "all 3 labels are 1, so there is nothing to learn"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": -1}], (), "the label -1, which marks rows without labels"),
        ([{"text": "a"}], (), "needs the columns text and label, got text"),
        ([{"text": "a", "label": 1}, {"text": " ", "label": 0}], (), "row 2 has the text ' ', which has no words"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], ("--problem_type", "regression"), "row 1 has"),
        ([{"text": "a", "label": [1]}], ("--problem_type", "single_label_classification"), "has lists of labels"),
        ([{"text": "a", "label": 1}], ("--text_pair_column", "other"), "text and other and label, got label, text"),
        ([{"text": "a", "label": 1}], ("--dataset_streaming", "true"), "reads all labels before training"),
    ],
)  # fmt: skip
def test_wrong_labels_are_sentences(rows, options, words, here, models, tmp_path):
    refuse(here, "classify", models, rows, options, tmp_path, words)


def test_a_label_outside_the_known_classes(models, tmp_path):
    import datasets

    from tigon.cli.train.classify import find_labels
    from tigon.cli.train.options import parse_options

    options = parse_options(["--task", "classify", "--model_name_or_path", "m", "--dataset_name", "d"])
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, 2]}, features=features)
    assert find_labels(rows, options) == (SINGLE, [0, 1, 2], ["a", "b", "c"])  # with a class that no row has
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, -1]}, features=features)
    with pytest.raises(Problem, match="row 2 has label -1, outside its 3 classes"):
        find_labels(rows, options)


def test_metrics():
    z = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 2.0], [1.0, 0.0, 2.0]])
    found = measure(SINGLE, z, np.array([0, 1, 2, 0]))
    assert found == {"accuracy": 0.75, "f1": pytest.approx((2 / 3 + 1 + 2 / 3) / 3)}
    found = measure(MULTI, np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert found == {"accuracy": 0.5, "f1": pytest.approx((2 / 3 + 1) / 2), "f1_micro": pytest.approx(0.8)}
    found = measure(REGRESSION, np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 2.0, 3.0]))
    assert found["mse"] == pytest.approx(1 / 3)
    assert found["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [1, 2, 3])[0, 1])
    sklearn = pytest.importorskip("sklearn.metrics")
    target, z = np.arange(30) % 4, np.random.default_rng(0).normal(size=(30, 4))
    assert measure(SINGLE, z, target)["f1"] == pytest.approx(sklearn.f1_score(target, z.argmax(1), average="macro"))


SCORED = [{"query": a, "document": b, "label": float(a == b)} for a in WORDS for b in WORDS]
EMBED = [{"anchor": f"{a} {b}", "positive": f"{b} {a} {a}", "negative": b} for a in WORDS for b in WORDS[:4]]
HEADLESS = {
    "embed": ("encoder", EMBED, HELD_OUT),
    "embed-cached": ("decoder", EMBED, ("--cached_batch_size", 3, "--direction", "symmetric", "--pooling", "mean")),
    "rerank": ("encoder", SCORED, HELD_OUT),
    "rerank-lists": ("encoder", [{"query": a, "documents": [a, "no"], "labels": [1, 0]} for a in WORDS], ()),
    "rerank-negatives": ("encoder", [{"query": a, "positive": a, "negative": "no"} for a in WORDS], ()),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADLESS)
def test_an_embedding_model_and_a_reranker_train(case, here, models, tmp_path):
    st = pytest.importorskip("sentence_transformers", minversion="6.0")
    name, rows, options = HEADLESS[case]
    task, _, variant = case.partition("-")
    output = tmp_path / "run"
    arguments = ("train", "--task", task, "--model_name_or_path", models[name], "--dataset_name",
                 jsonl(tmp_path / "rows.jsonl", rows), "--output_dir", output, *FEW, *options)  # fmt: skip
    done = here(*arguments).ok()
    found = losses(output)
    assert list(found) == [1, 2, 3, 4]
    assert "parts fused" in done.out
    assert "1_Pooling/config.json" in json.loads((output / "manifest.json").read_text())["files"] or task == "rerank"
    if task == "embed":
        assert ("eval_cosine_ndcg@10" in done.out) == (not variant)  # with held-out rows
        assert st.SentenceTransformer(str(output), device="cpu").encode(["red"]).shape == (1, 32)
    else:
        assert st.CrossEncoder(str(output), device="cpu").predict([("red", "cat")]).shape == (1,)
    if variant:
        return
    whole = (output / "model.safetensors").read_bytes()
    forget_end(output)
    here(*arguments, "--resume_from_checkpoint", "true").ok()
    assert (losses(output), (output / "model.safetensors").read_bytes()) == (found, whole)
    if task == "embed":  # the library's own loss, of the same model
        here(*arguments[:7], "--output_dir", tmp_path / "plain", *FEW, *options, "--no_fuse").ok()
        assert list(losses(tmp_path / "plain").values()) == pytest.approx(list(found.values()), abs=1e-3)


@pytest.mark.parametrize(
    ("task", "rows", "options", "words"),
    [
        ("embed", [{"text": "a"}], (), "needs the columns anchor and positive or query and positive or"),
        ("embed", [{"anchor": "a", "positive": ""}], (), "row 1 has the positive '', which has no words"),
        ("embed", [{"anchor": "a", "positive": "b"}], ("--per_device_train_batch_size", 1), "must be at least 2"),
        ("rerank", [{"query": "a", "document": "b", "label": 2}], (), "not a number from 0 to 1"),
        ("rerank", [{"query": "a", "document": "b", "label": 1}], (), "all 1 labels are 1"),
        ("rerank", [{"query": "a", "documents": ["b"], "labels": [1, 0]}], (), "has 1 documents and 2 labels"),
        ("rerank", [{"query": "a", "positive": "b", "negative": "c"}], ("--rerank_loss", "bce"), "does not fit the"),
        ("rerank", [{"query": "a", "positive": "b", "negative": "c"}], ("--use_peft",), "trains the whole model"),
    ],
)  # fmt: skip
def test_wrong_pairs_are_sentences(task, rows, options, words, here, models, tmp_path):
    pytest.importorskip("sentence_transformers", minversion="6.0")
    refuse(here, task, models, rows, options, tmp_path, words)


def test_without_the_library_the_task_names_the_extra(here, monkeypatch, tmp_path):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sentence_transformers" else find(name, *more)
    )
    here("train", "--task", "embed", "--model_name_or_path", "m", "--dataset_name", "d").problem("[embed]")
