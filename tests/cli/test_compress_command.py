"""`tigon compress`: a folder of a model to a smaller one, which `tigon verify` opens."""

import json
import sys
from pathlib import Path

import pytest
from command import write_model

pytest.importorskip("transformers")
pytest.importorskip("typer")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sys.path.insert(0, str(EXAMPLES))
    try:
        import small_model
    finally:
        sys.path.remove(str(EXAMPLES))
    folder = tmp_path_factory.mktemp("compress")
    small_model.model().save_pretrained(folder / "model")
    small_model.tokenizer().save_pretrained(folder / "model")
    text = "".join(a + b + ". " for a, b in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True))
    (folder / "calib.txt").write_text(text * 20)
    (folder / "short.txt").write_text("the cat sat on")
    return folder


def test_a_model_becomes_smaller_and_opens(tigon, folder):
    options = ("--data", "calib.txt", "--budget", "0.2", "-o", "small", "--embeddings", "--json", "--held", "calib.txt")
    done = tigon("compress", "model", *options, cwd=folder).ok()
    found = json.loads(done.out)
    share = found["feed_forward"]["bytes"] / found["feed_forward"]["bytes_before"]
    assert 0.1 < share <= 0.2
    assert [row["name"] for row in found["embeddings"]["layers"]] == ["model.embed_tokens"]
    sizes = [(folder / name / "model.safetensors").stat().st_size for name in ("model", "small")]
    assert sizes[1] < 0.6 * sizes[0]
    assert [round(1e6 * mb) for mb in found["mb"]] == sizes
    held = found["held"]
    assert 0 < held["distance"] < 1e-3
    assert held["before"]["loss"] != held["now"]["loss"] == pytest.approx(held["before"]["loss"], abs=0.01)
    assert held["before"]["ms"] > 0 < held["now"]["ms"]
    assert "agree" in tigon("verify", "small", "--seq-len", "16", cwd=folder).ok().out


def test_dense_weights_open_without_tigon(tigon, folder):
    transformers = pytest.importorskip("transformers")
    options = (
        "--data",
        ".",
        "--heavy-bits",
        "4",
        "-o",
        "dense",
        "--dense",
        "--plot",
        "report.png",
        "--held",
        "calib.txt",
    )
    done = tigon("compress", "model", *options, cwd=folder).ok()
    assert "→ bits" in done.out
    assert "MiB before" in done.out
    assert "MB before" in done.out
    assert "nats per token before" in done.out
    assert "latency for one sequence" in done.out
    assert (folder / "report.png").stat().st_size > 5000
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "1.5"), ("budget", "at most 1", "got 1.5")),
        (("--budget", "0.2", "--heavy-bits", "4"), ("--budget and --heavy-bits are mutually exclusive",)),
        ((), ("--budget must be given",)),
        (("--heavy-bits", "7"), ("heavy must be one of", "got 7")),
        (("--budget", "0.5", "--method", "bitz"), ("--method must be one of", "did you mean 'bits'")),
        (("--heavy-bits", "4", "--method", "rank"), ("needs --method bits, got rank",)),
        (("--budget", "0.5", "--share", "0.5"), ("--share needs --heavy-bits",)),
        (("--budget", "0.5", "--plot", "x.txt"), ("--plot must end in .png, .svg, .pdf, got x.txt",)),
        (("--budget", "0.5", "--tokens", "1"), ("--tokens", "256")),
        (("--budget", "0.5", "--held", "nowhere"), ("--held nowhere: there is no such file",)),
        (("--budget", "0.5", "--data", "nowhere"), ("--data nowhere: there is no such file",)),
    ],
)
def test_problems_get_one_sentence(tigon, folder, arguments, words):
    data = () if "--data" in arguments else ("--data", "calib.txt")
    tigon("compress", "model", *data, "-o", "none", *arguments, cwd=folder).problem("compress", *words)
    assert not (folder / "none").exists()


def test_too_little_text_says_how_much_is_needed(tigon, folder):
    tigon("compress", "model", "--data", "short.txt", "--budget", "0.5", "-o", "none", cwd=folder).problem(
        "calibration tokens are too few", "at least 256"
    )


def test_a_tied_model_of_more_layers_than_verify_builds(tigon, tmp_path, text):
    write_model(tmp_path / "model", text, num_hidden_layers=4, tie_word_embeddings=True)
    (tmp_path / "calib.txt").write_text(text.read_text()[:4000])
    options = ("compress", "model", "--data", "calib.txt", "--budget", "0.3", "-o", "small", "--embeddings")
    done = tigon(*options, "--plot", "report.png", cwd=tmp_path).ok()
    assert "skipped: model.embed_tokens: the weight is tied" in done.out
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert "2 layers" in tigon("verify", "small", "--seq-len", "8", cwd=tmp_path).ok().out
    assert "4 layers" in tigon("verify", "small", "--seq-len", "8", "--layers", "0", cwd=tmp_path).ok().out

    # What is there stays, whatever it is.
    before = (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns
    tigon(*options, cwd=tmp_path).problem("--output small is there; --overwrite replaces")
    tigon(*options[:-2], "other", "--plot", "report.png", cwd=tmp_path).problem("--plot report.png is there")
    tigon(
        "compress", "model", "--data", "calib.txt", "--budget", "0.3", "-o", ".", "--overwrite", cwd=tmp_path
    ).problem("--output . holds model, which is read")
    assert (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns == before
    tigon(*options, "--overwrite", cwd=tmp_path).ok()
    assert (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns > before
    (tmp_path / "small" / "notes.txt").write_text("mine")
    tigon(*options, "--overwrite", cwd=tmp_path).problem("holds files of another kind")

    content = bytearray((tmp_path / "small" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "small" / "model.safetensors").write_bytes(content)
    tigon("verify", "small", cwd=tmp_path).problem("model.safetensors has changed since it was written")
