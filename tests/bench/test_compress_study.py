"""benchmarks/compress.py, compress_latency.py and compress_sst2.py: what they record of models of a few weights."""

import sys
from pathlib import Path

import pytest
import torch
from harness import report


@pytest.fixture(scope="module")
def study(script):
    pytest.importorskip("transformers")
    return script("compress")


def test_ways_are_recorded_and_not_measured_again(study, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    for name in ("a.md", "b.txt"):
        (tmp_path / "data" / name).write_text(f"The text of {name} says what it says. " * 40)
    monkeypatch.setattr(study, "LENGTH", 64)
    monkeypatch.setattr(study, "SHORT", 16)
    ways = ["whole", "bits 3", "bits 4", "bits 4/3 0.25", "nearest 3", "prune"]
    arguments = ["--data", str(tmp_path / "data"), "--model", "relu", "--output", str(tmp_path), "--name", "c.json",
                 "--tokens", "512", "--held", "256", "--steps", "3", "--only"]  # fmt: skip
    assert study.main([*arguments, *ways[:2]]) == 0
    first = report.load(tmp_path / "c.json")["rows"]
    assert study.main([*arguments, *ways]) == 0
    content = report.load(tmp_path / "c.json")
    assert content["kind"] == "compress"
    assert content["rows"][:2] == first
    rows = {row["method"]: row for row in content["rows"]}
    assert list(rows) == ways
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    assert rows["whole"]["distance"] == 0 < rows["bits 4"]["distance"] < rows["bits 3"]["distance"]
    assert rows["bits 3"]["bits"] < rows["bits 4/3 0.25"]["bits"] < rows["bits 4"]["bits"] < 5
    assert rows["bits 3"]["distance"] < 0.5 * rows["nearest 3"]["distance"]
    assert rows["prune"]["share"] <= 0.6
    assert "bits 4/3 0.25 takes back" in capsys.readouterr().out


def test_data_that_do_not_do_get_a_sentence(study, tmp_path):
    with pytest.raises(SystemExit, match=r"--data must hold at least two .md or .txt files, got 0"):
        study.main(["--data", str(tmp_path), "--model", "relu", "--output", str(tmp_path)])


def test_an_encoder_is_judged_before_and_after(script, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sst2 = script("compress_sst2")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        import small_model
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "model")
    small_model.tokenizer().save_pretrained(tmp_path / "model")
    kinds = (small_model.ANSWERS, small_model.WRONG)
    rows = [f"{a}{b}\t{label}" for label in (0, 1) for a in small_model.PROMPTS for b in kinds[label]]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    monkeypatch.setattr(sst2, "WAYS", {way: sst2.WAYS[way] for way in ("whole", "bits 4/3 0.25, embeddings")})
    arguments = ["--data", str(tmp_path), "--model", str(tmp_path / "model"), "--output", str(tmp_path)]
    assert sst2.main([*arguments, "--name", "s.json"]) == 0
    whole, small = report.load(tmp_path / "s.json")["rows"]
    assert whole["share"] == 1 > small["share"] > 0.2
    assert whole["accuracy"] == whole["refitted"] == 100  # one word tells the classes apart
    assert small["accuracy"] > 90
    with pytest.raises(SystemExit, match=r"--data must hold train.tsv"):
        sst2.main(["--data", str(tmp_path / "model"), *arguments[2:]])


def test_models_are_timed_by_turns(script, tmp_path):
    transformers = pytest.importorskip("transformers")
    latency = script("compress_latency")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "encoder")
    llama = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=160, **sizes)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "decoder")
    ways = ["prune", "bits 4/3 0.25", "bits 4/3 0.25 widened"]
    models = [word for name in ("encoder", "decoder") for word in ("--model", str(tmp_path / name))]
    assert latency.main([*models, "--output", str(tmp_path), "--rounds", "2", "--threads", "1", "--only", *ways]) == 0
    rows = report.load(tmp_path / "cpu-compress-latency.json")["rows"]
    by = {}
    for row in rows:
        by.setdefault((row["model"], row["call"]), {})[row["method"]] = row
    assert [call for _, call in by] == ["128 tokens", "16 tokens", "128 tokens", "1 token"]
    for some in by.values():
        assert list(some) == ["dense", *ways]
        assert some["dense"]["speed"] == 1
        for row in some.values():
            assert row["least"] <= row["ms"]
            assert row["speed"] == pytest.approx(some["dense"]["ms"] / row["ms"])
    shaped = ["--shape", "32x64", "--tokens", "64", "--rounds", "2", "--only", "prune", "bits 4/3 0.25"]
    assert latency.main([*shaped, "--output", str(tmp_path), "--name", "shape.json"]) == 0
    rows = report.load(tmp_path / "shape.json")["rows"]
    assert {row["call"] for row in rows} == {"64 tokens, feed-forward", "64 tokens, two layers"}
    assert {row["model"] for row in rows} == {"llama 32×64"}
    assert len(rows) == 6
    with pytest.raises(SystemExit):
        latency.main(["--output", str(tmp_path)])
