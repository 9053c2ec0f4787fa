"""Whatever is wrong with a command line is said in one sentence, with exit status 2, and nothing is written."""

import errno
import json
import subprocess
import sys

import pytest

from tigon import __version__
from tigon.cli.problem import is_disk_full
from tigon.install import install


def test_help_is_quick_and_imports_nothing_heavy(tigon):
    shown = tigon("--help").ok()
    for command in ("demo", "train", "inspect", "verify", "compress", "doctor"):
        assert command in shown.out
    code = (
        "import sys\nfrom tigon.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]"), done.stdout[-200:]


def test_help_of_train_lists_the_options_of_its_task(tigon):
    pytest.importorskip("trl", minversion="1.16")
    for task, config, own in (("sft", "SFTConfig", "--packing"), ("grpo", "GRPOConfig", "--reward_funcs")):
        shown = tigon("train", "--task", task, "--help").ok().out
        titles = ["DataArguments:", "ModelConfig:", "FuseArguments:", f"{config}:", "TrainingArguments:"]
        assert sorted(titles, key=shown.index) == titles
        for option in (
            own,
            "--dataset_name",
            "--lora_r",
            "--recompute",
            "--optim",
            "--report_to",
            "--lr_scheduler_type",
        ):
            assert f"\n  {option} " in shown, option
        assert shown.index(own) < shown.index("TrainingArguments:")


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
        "main(['train', '--model_name_or_path', 'llama-tiny', '--dataset_name', 'x.txt'])\n"
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
    "broken.jsonl": BROKEN_JSON,
    "no_text.jsonl": '{"text": "fine"}\n{"content": "what"}\n',
    "columns.csv": "content,title\na,b\n",
    "latin.txt": b"caf\xe9",
    "vit/config.json": json.dumps({"model_type": "vit"}),
    "untyped/config.json": "{}",
    "no_config/weights.txt": "",
    "adapters/adapter_config.json": "{}",
    "empty_folder/readme.bin": "",
    "run/notes.txt": "mine",
    "half/checkpoint-5/config.json": "{}",
    "list.yaml": "- a",
    "unknown.yaml": "learning_rte: 1",
    "wrong.yaml": "max_steps: 2.5",
}
TRAIN = (
    "train", "--use_cpu", "true", "--output_dir", "new", "--dataset_name", "text.txt",
    "--model_name_or_path", "llama-tiny",
)  # fmt: skip
# fmt: off
PROBLEMS = [
    (("fly",), "No such command 'fly'"),
    ((*TRAIN, "--colour", "red"), "there is no option --colour"),
    ((*TRAIN, "--learning_rat=1"), "there is no option --learning_rat; did you mean --learning_rate?"),
    ((*TRAIN, "--max_steps", "many"), "argument --max_steps/--max-steps: invalid int value: 'many'"),
    (("train", "--dataset_name", "text.txt"), "--model_name_or_path is missing"),
    (("train", "--model_name_or_path", "llama-tiny"), "the following arguments are required: --dataset_name"),
    ((*TRAIN, "--task", "ppo"), "reward, grpo, rloo, distillation, rank, classify, embed, rerank, got ppo"),
    ((*TRAIN, "--task", "dpo", "--reward_funcs", "a.b"), "there is no option --reward_funcs"),
    ((*TRAIN, "--task", "grpo"), "--task grpo needs --reward_funcs"),
    ((*TRAIN, "--config", "list.yaml"), "list.yaml must hold an object, got a list"),
    ((*TRAIN, "--config", "unknown.yaml"), "there is no option --learning_rte; did you mean --learning_rate?"),
    ((*TRAIN, "--config", "wrong.yaml"), "invalid int value: '2.5'"),
    ((*TRAIN, "--dataset_name", "gone.txt"), "gone.txt: there is no such file"),
    ((*TRAIN, "--dataset_name", "empty.txt"), "the data set is empty"),
    ((*TRAIN, "--dataset_name", "broken.jsonl"), "broken.jsonl cannot be read (JSON parse error"),
    ((*TRAIN, "--dataset_name", "no_text.jsonl"), "no_text.jsonl: row 2 has no text"),
    ((*TRAIN, "--dataset_name", "columns.csv"), "needs the columns text or messages or prompt and completion"),
    ((*TRAIN, "--dataset_name", "latin.txt"), "latin.txt cannot be read ('utf-8' codec can't decode byte 0xe9"),
    ((*TRAIN, "--dataset_name", "empty_folder"), "no file ends in .txt"),
    ((*TRAIN, "--dataset_name", "."), "the files have different formats"),
    ((*TRAIN, "--dataset_name", "some/dataset"), "some/dataset cannot be read"),
    ((*TRAIN, "--task", "dpo"), "--task dpo starts from trained weights, and llama-tiny has none"),
    ((*TRAIN, "--eval_strategy", "steps"), "text.txt has no split test, only train; --test_split_size 0.02 holds out"),
    ((*TRAIN, "--test_split_size", "1"), "--test_split_size must be at least 0 and below 1, got 1.0"),
    ((*TRAIN, "--model_name_or_path", "llama-tinny"), "did you mean llama-tiny"),
    ((*TRAIN, "--model_name_or_path", "./gone"), "not a directory, a preset or a hub name"),
    ((*TRAIN, "--model_name_or_path", "someone/some-model"), "the Hugging Face hub returned no configuration"),
    ((*TRAIN, "--model_name_or_path", "no_config"), "has no config.json"),
    ((*TRAIN, "--model_name_or_path", "half"), "the run in this directory has not finished; pass one of its"),
    ((*TRAIN, "--model_name_or_path", "adapters"), "the directory holds adapters, not a model; merge the"),
    ((*TRAIN, "--model_name_or_path", "untyped"), "has no model_type"),
    ((*TRAIN, "--model_name_or_path", "vit"), "no causal language-model head"),
    ((*TRAIN, "--recompute", "all"), "argument --recompute: invalid choice: 'all'"),
    ((*TRAIN, "--shared_prefix", "true"), "--shared_prefix true requires --task dpo, grpo, rloo, got --task sft"),
    ((*TRAIN, "--no_fuse", "--recompute", "mlp"), "need tigon.fuse and exclude --no_fuse"),
    ((*TRAIN, "--max_length", "4096"), "--max_length 4096 exceeds the 1024 positions of llama-tiny"),
    ((*TRAIN, "--use_peft"), "--use_peft starts from trained weights, and llama-tiny has none"),
    ((*TRAIN, "--tokenizer_name_or_path", "./gone"), "no tokenizer"),
    ((*TRAIN, "--resume_from_checkpoint", "true"), "no checkpoint in"),
    ((*TRAIN, "--output_dir", "run"), "is not empty; use --resume_from_checkpoint true to continue the run"),
    ((*TRAIN, "--output_dir", "text.txt"), "a file with that name exists"),
    (("demo", "--device", "abacus"), "--device must be auto, cpu or cuda"),
    (("inspect",), "Missing argument"),
    (("verify", "llama-tiny", "--dtype", "int8"), "--dtype must be one of"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "words"), PROBLEMS, ids=[" ".join(a[-3:]) for a, _ in PROBLEMS])
def test_a_wrong_argument_is_one_sentence(tigon, tmp_path, arguments, words):
    if arguments[0] == "train":
        pytest.importorskip("trl", minversion="1.16")
    for name, contents in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    tigon(*arguments, cwd=tmp_path).problem(words)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TIGON_CHUNK_BYTES", "many", "TIGON_CHUNK_BYTES must be a whole number of bytes, got 'many'"),
        ("TIGON_BACKEND", "triton", "the triton backend was forced, but"),
    ],
)
def test_a_wrong_environment_is_one_sentence(tigon, variable, value, words):
    tigon("verify", "llama-tiny", "--device", "cpu", "--seq-len", 8, **{variable: value}).problem(words)


def test_a_device_that_is_not_there(tigon):
    for command in (("demo",), ("verify", "llama-tiny")):
        tigon(*command, "--device", "cuda", CUDA_VISIBLE_DEVICES="").problem("--device cuda")


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
    assert is_disk_full(error)
    later = KeyError("raised while the first was handled")
    later.__context__ = error
    assert is_disk_full(later)
    assert not is_disk_full(ValueError("a number is too large"))


def test_clean_up_that_fails_after_an_interruption_is_an_interruption(capsys):
    from tigon.cli import _explain

    later = RuntimeError("cannot join thread before it is started")
    later.__context__ = KeyboardInterrupt()
    assert _explain(later) == 130
    assert capsys.readouterr().err == "tigon: interrupted\n"
    with pytest.raises(RuntimeError):
        _explain(RuntimeError("a bug"))
