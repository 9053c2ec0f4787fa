"""Whatever is wrong with a command line is said in one sentence, with exit status 2, and nothing is written."""

import errno
import json
import subprocess
import sys

import pytest

from tigon import __version__
from tigon.cli.model import _from_path
from tigon.cli.problem import Problem, disk_full
from tigon.install import install


def test_help_is_quick_and_imports_nothing_heavy(tigon):
    shown = tigon("--help").ok()
    for command in ("demo", "train", "inspect", "verify", "compress", "doctor"):
        assert command in shown.out
    code = (
        "import sys\nfrom tigon.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]"), done.stdout[-200:]


def test_version(tigon):
    assert tigon("--version").ok().out.strip() == f"tigon {__version__}"


def test_without_a_command_the_help_is_shown(tigon):
    assert "Usage" in tigon().ok().out


def test_a_missing_extra_names_the_install_line(tmp_path):
    # A finder that hides one package, as an installation without the extra would.
    hide = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == sys.argv[1] else find(name, *a)\n"
        "from tigon.cli import main\n"
        "main(['train', '--model', 'llama-tiny', '--data', 'x.txt'])\n"
    )
    for package in ("typer", "transformers"):
        done = subprocess.run([sys.executable, "-c", hide, package], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert package in done.stderr
        assert install("train") in done.stderr


BROKEN_JSON = '{"text": "good"}\n\n{"text": "bad"\n'
# name of a file in the working directory → its contents
FILES = {
    "text.txt": "some words " * 20,
    "empty.txt": "",
    "blank.txt": " \n\n ",
    "broken.jsonl": BROKEN_JSON,
    "no_text.jsonl": '{"text": "fine"}\n{"content": "what"}\n',
    "mixed.jsonl": '{"text": "fine"}\n{"messages": [{"role": "user", "content": "hi"}]}\n',
    "latin.txt": b"caf\xe9",
    "vit/config.json": json.dumps({"model_type": "vit"}),
    "untyped/config.json": "{}",
    "broken/config.json": "{",
    "no_config/weights.txt": "",
    "adapters/adapter_config.json": "{}",
    "empty_folder/readme.bin": "",
    "run/metrics.jsonl": "{}\n",
    "odd/run.json": "{",
    "mistyped/run.json": '{"options": {"steps": "many"}}',
    "bytes/run.json": b"\xff\xfe{}",
    "deep/run.json": "[" * 100_000,
    "listed/run.json": "[]",
    "finished/run.json": '{"options": {}, "files": ["config.json"]}',
    "finished/config.json": "{}",
}
TRAIN = ("train", "--output", "new", "--data", "text.txt", "--model", "llama-tiny")
# fmt: off
PROBLEMS = [
    (("fly",), "No such command 'fly'"),
    (("train", "--colour"), "--colour"),
    ((*TRAIN, "--steps", "many"), "'--steps'"),
    (("train", "--data", "text.txt"), "--model is missing"),
    (("train", "--model", "llama-tiny"), "--data is missing"),
    ((*TRAIN, "--data", "gone.txt"), "gone.txt: there is no such file"),
    ((*TRAIN, "--data", "gone/*.txt"), "no file matches"),
    ((*TRAIN, "--data", "empty.txt"), "the data set is empty"),
    ((*TRAIN, "--data", "blank.txt"), "the data set is empty"),
    ((*TRAIN, "--data", "broken.jsonl"), "line 3 is not JSON"),
    ((*TRAIN, "--data", "no_text.jsonl"), "line 2 must have a 'text' string"),
    ((*TRAIN, "--data", "mixed.jsonl"), "train on one kind at a time"),
    ((*TRAIN, "--data", "latin.txt"), "not UTF-8 text (byte 3 is 0xe9)"),
    ((*TRAIN, "--data", "empty_folder"), "the directory has no"),
    ((*TRAIN, "--data", "some/dataset"), "no data set of that name can be loaded"),
    ((*TRAIN, "--model", "llama-tinny"), "did you mean llama-tiny"),
    ((*TRAIN, "--model", "./gone"), "there is no such directory"),
    ((*TRAIN, "--model", "someone/some-model"), "the Hugging Face hub gave no configuration"),
    ((*TRAIN, "--model", "no_config"), "has no config.json"),
    ((*TRAIN, "--model", "adapters"), "the directory has adapters, not a model; merge them"),
    ((*TRAIN, "--model", "untyped"), "has no model_type"),
    ((*TRAIN, "--model", "broken"), "config.json is not JSON"),
    ((*TRAIN, "--model", "vit"), "no causal language-model head"),
    ((*TRAIN, "--steps", "0"), "--steps must be above 0"),
    ((*TRAIN, "--lr", "-1"), "--lr must be above 0"),
    ((*TRAIN, "--schedule", "spiral"), "cosine, linear, constant"),
    ((*TRAIN, "--precision", "int3"), "--precision must be one of"),
    ((*TRAIN, "--recompute", "all"), "--recompute must be one of auto, none, product, cheap, mlp, got all"),
    ((*TRAIN, "--plain", "--offload"), "--offload is a part of tigon.fuse, and --plain trains without it"),
    ((*TRAIN, "--plain", "--recompute", "mlp"), "--recompute is a part of tigon.fuse, and --plain trains without it"),
    ((*TRAIN, "--eval-fraction", "1"), "--eval-fraction"),
    ((*TRAIN, "--seq-len", "1"), "--seq-len must be 2 or more"),
    ((*TRAIN, "--seq-len", "4096"), "beyond the 1024 positions"),
    ((*TRAIN, "--seq-len", "500"), "less than one block of --seq-len 500"),
    ((*TRAIN, "--lora", "8"), "adapts trained weights"),
    ((*TRAIN, "--tokenizer", "./gone"), "there is no tokenizer"),
    ((*TRAIN, "--resume", "--overwrite"), "contradict each other"),
    (("train", "--resume", "--output", "new"), "new to resume"),
    (("train", "--resume", "--output", "odd"), "cannot be read"),
    (("train", "--resume", "--output", "mistyped"), "not the record of a run of this version"),
    (("train", "--resume", "--output", "bytes"), "cannot be read"),
    (("train", "--resume", "--output", "deep"), "cannot be read"),
    (("train", "--resume", "--output", "listed"), "run.json must hold an object, got a list"),
    ((*TRAIN, "--seed", str(2**32)), "--seed must be at most 4294967295"),
    ((*TRAIN, "--steps", "9" * 30), "--steps must be at most"),
    ((*TRAIN, "--output", ""), "--output must be the name of a folder, got an empty one"),
    ((*TRAIN, "--output", "finished"), "holds another run (config.json): --resume goes on with it"),
    ((*TRAIN, "--output", "run"), "has metrics.jsonl, which no run of tigon train wrote there"),
    ((*TRAIN, "--output", "run", "--overwrite"), "has metrics.jsonl, which no run of tigon train wrote there"),
    ((*TRAIN, "--output", "odd", "--overwrite"), "has run.json, which no run of tigon train wrote there"),
    ((*TRAIN, "--model", "no_config", "--output", "no_config", "--overwrite"), "is what --model reads"),
    ((*TRAIN, "--model", "no_config", "--output", "no_config/new"), "is inside of what --model reads"),
    ((*TRAIN, "--model", "vit/config.json", "--output", "vit"), "contains what --model reads"),
    ((*TRAIN, "--data", "empty_folder", "--output", "new/../empty_folder/new"), "is inside of what --data reads"),
    ((*TRAIN, "--data", "./**/*.txt"), "is inside of what --data reads"),
    ((*TRAIN, "--data", "v*/*.json", "--output", "vit"), "contains what --data reads"),
    ((*TRAIN, "--data", "/"), "is inside of what --data reads, /"),
    ((*TRAIN, "--tokenizer", "no_config", "--output", "no_config"), "is what --tokenizer reads"),
    ((*TRAIN, "--output", "text.txt"), "there is a file of that name"),
    ((*TRAIN, "--output", "text.txt/run"), "text.txt/run: cannot be written to"),
    ((*TRAIN, "--data", ""), "--data is missing"),
    (("demo", "--device", "abacus"), "--device must be auto, cpu or cuda"),
    (("demo", "--output", "text.txt"), "there is a file of that name"),
    (("inspect",), "Missing argument"),
    (("inspect", "vit"), "no causal language-model head"),
    (("verify", "llama-tiny", "--dtype", "int8"), "--dtype must be one of"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "words"), PROBLEMS, ids=[" ".join(a[-3:]) for a, _ in PROBLEMS])
def test_a_wrong_argument_is_one_sentence(tigon, tmp_path, arguments, words):
    if "some/dataset" in arguments:
        pytest.importorskip("datasets")
    for name, contents in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    tigon(*arguments, cwd=tmp_path).problem(words)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TIGON_CHUNK_BYTES", "many", "TIGON_CHUNK_BYTES must be a whole number of bytes, got 'many'"),
        ("TIGON_BACKEND", "cuda", "TIGON_BACKEND must be 'triton', 'torch' or 'auto', got 'cuda'"),
        ("TIGON_BACKEND", "triton", "the triton backend was forced, but"),
    ],
)
def test_a_wrong_environment_is_one_sentence(tigon, variable, value, words):
    tigon("verify", "llama-tiny", "--device", "cpu", "--seq-len", 8, **{variable: value}).problem(words)


def test_a_run_that_has_not_ended_is_no_model_yet(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(Problem, match="has not ended, so it has no model yet; go on by tigon train --resume"):
        _from_path(tmp_path)


def test_a_device_that_is_not_there(tigon, text, tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for command in (("demo",), ("verify", "llama-tiny"), ("train", "--model", "llama-tiny", "--data", text)):
        tigon(*command, "--device", "cuda", cwd=tmp_path, **hidden).problem("--device cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        RuntimeError("basic_ios::clear: iostream error"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("File too large (os error 27)"),
    ],
    ids=str,
)
def test_what_libraries_say_of_a_full_disk(error):
    assert disk_full(error)
    later = KeyError("raised while the first was handled")
    later.__context__ = error
    assert disk_full(later)
    assert not disk_full(ValueError("a number is too large"))
