"""The folder of a run: it is the same from everywhere, only a run's own files are deleted, and one run works there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import environment, losses

from tigon.cli import folder
from tigon.cli.checkpoint import publish, seal
from tigon.cli.folder import Claim, check_apart, check_room, clear, is_closed, located, move_in, record, recorded_files
from tigon.cli.problem import Problem


def whole_run(output, steps=(4, 8)):
    """What a finished run leaves, in little."""
    output.mkdir(parents=True)
    record(output, options={})
    staged = output / ".incomplete" / "model"
    staged.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (staged / name).write_text("{}")
    move_in(output, staged)
    for step in steps:
        staged = output / ".incomplete" / f"checkpoint-{step}"
        (staged / "state").mkdir(parents=True)
        (staged / "state" / "optimizer.pt").write_bytes(b"state")
        seal(staged)
        publish(staged, output / staged.name)
    (output / "metrics.jsonl").write_text("{}\n")
    (output / "tensorboard").mkdir()
    (output / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    return output


def contents(place):
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_a_run_and_nothing_else_is_deleted(tmp_path):
    output = whole_run(tmp_path / "run")
    (output / "notes.txt").write_text("mine")
    for name in ("results", "checkpoint-best"):
        (output / name).mkdir()
        (output / name / "config.json").write_text("mine")
    with pytest.raises(Problem, match=r"holds another run .*--resume goes on with it, --overwrite replaces it"):
        check_room(output, overwrite=False)
    clear(output)
    kept = {"notes.txt", "results/config.json", "checkpoint-best/config.json"}
    assert contents(output) == dict.fromkeys(kept, b"mine")
    check_room(output, overwrite=False)


FOREIGN = [
    "config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "checkpoint-4/notes.txt",
    "checkpoint-12/model.safetensors", "tensorboard/notes.txt",
]  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_files_that_no_run_wrote_is_left_alone(tmp_path, name):
    output = tmp_path / "run"
    if name != "config.json":
        whole_run(output)
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_text("mine")
    before = contents(output)
    for overwrite in (False, True):
        with pytest.raises(Problem, match=f"run has .*{Path(name).name}, which no run of tigon train wrote there"):
            check_room(output, overwrite)
    with pytest.raises(Problem, match="which no run"):
        clear(output)
    assert contents(output) == before


def test_a_link_is_no_checkpoint_to_delete(tmp_path):
    output = whole_run(tmp_path / "run")
    elsewhere = whole_run(tmp_path / "elsewhere") / "checkpoint-8"
    (output / "checkpoint-16").symlink_to(elsewhere)
    with pytest.raises(Problem, match="has checkpoint-16, which no run"):
        clear(output)
    assert (elsewhere / "manifest.json").exists()


@pytest.mark.parametrize("files", [["../mine.txt", "..", "", "/etc", 3, None], "mine.txt", {"mine.txt": 1}, None])
def test_a_record_does_not_lead_out_of_its_folder(tmp_path, files):
    (tmp_path / "mine.txt").write_text("mine")
    output = tmp_path / "run"
    output.mkdir()
    record(output, options={}, files=files)
    assert recorded_files(output) == set(folder.ALWAYS)
    clear(output)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


def test_a_users_model_card_stays(tmp_path):
    output = whole_run(tmp_path / "run")
    for text in ("first", "second"):  # PEFT writes one beside adapters
        staged = output / ".incomplete" / "model"
        staged.mkdir(parents=True)
        (staged / "README.md").write_text(text)
        move_in(output, staged)
        assert (output / "README.md").read_text() == text
    other = whole_run(tmp_path / "other")
    (other / "README.md").write_text("mine")
    staged.mkdir(parents=True)
    (staged / "README.md").write_text("third")
    move_in(other, staged)
    assert (other / "README.md").read_text() == "mine"
    clear(other)
    assert contents(other) == {"README.md": b"mine"}


# ------------------------------------------------------------------------------------------------------------- paths


def test_paths_are_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "llama-tiny").mkdir()
    for value in ("~/m", "m", "./m", str(tmp_path / "m")):
        for option in ("model", "data", "tokenizer", "output"):
            assert located(option, value) == str(tmp_path / "m")
    assert located("output", "~/new") == str(tmp_path / "new")
    assert located("data", "~/*.txt") == str(tmp_path / "*.txt")
    assert located("model", "llama-tiny") == "llama-tiny", "the preset, which find_model takes first"
    for option, name in (("model", "Qwen/Qwen3-0.6B"), ("data", "some/set:config"), ("tokenizer", "gpt2")):
        assert located(option, name) == name
    assert located("reward", "mine.py:score") == f"{tmp_path}/mine.py:score"
    assert located("reward", "regex:a.py:b") == "regex:a.py:b"
    assert located("reward", "module:score") == "module:score"
    with pytest.raises(Problem, match="--output must be the name of a folder"):
        located("output", " ")


def test_an_output_among_the_inputs_is_refused_by_any_name(tmp_path, monkeypatch):
    inputs = tmp_path / "in"
    inputs.mkdir()
    (inputs / "text.txt").write_text("words")
    (tmp_path / "link").symlink_to(inputs)

    def check(output, **given):
        options = {"model": "llama-tiny", "data": "", "tokenizer": None, "reward": None, **given}
        check_apart(Path(output), SimpleNamespace(**{name: str(v) if v else v for name, v in options.items()}))

    for option in ("model", "data", "tokenizer"):
        for output in (inputs, tmp_path / "link", inputs / "run" / "deep", tmp_path / "link" / "run", tmp_path):
            with pytest.raises(Problem, match=f"reads, {inputs}; a run writes"):
                check(output, **{option: inputs})
        check(tmp_path / "in2", **{option: inputs})
        check(tmp_path / "run", **{option: inputs / "text.txt"})
    with pytest.raises(Problem, match="contains what --reward reads"):
        check(inputs, reward=f"{inputs}/text.txt:score")
    check(inputs / "run", data=inputs / "*.txt")
    with pytest.raises(Problem, match="contains what --data reads"):
        check(inputs, data=inputs / "*.txt")
    with pytest.raises(Problem, match="is inside of what --data reads"):
        check(inputs / "run", data=inputs / "**" / "*.jsonl")


# -------------------------------------------------------------------------------------------------------------- lock


@pytest.mark.skipif(os.name != "posix", reason="the lock is POSIX's")
def test_a_killed_holder_does_not_block_and_a_living_one_does(tmp_path):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        claim = Claim()
        claim.take(tmp_path)
        grandchild = os.fork()  # as a worker that reads data, which outlives its parent
        if grandchild == 0:
            time.sleep(60)
            os._exit(0)
        os.write(tell, str(grandchild).encode())
        time.sleep(60)
        os._exit(0)
    grandchild = int(os.read(ready, 20))
    try:
        with Claim() as claim, pytest.raises(Problem, match=rf"another run is at work in .* \(process {child} on "):
            claim.take(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Claim() as claim:
            claim.take(tmp_path)
            claim.take(tmp_path)  # it is held already
            with pytest.raises(Problem, match=f"process {os.getpid()} on"):
                Claim().take(tmp_path)
        assert not (tmp_path / ".lock").exists()
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_nothing_is_held_where_nothing_can_be(tmp_path):
    for place in (tmp_path / "gone", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with Claim() as claim:
            claim.take(place)
            assert claim.file is None
    assert contents(tmp_path) == {"file": b""}


# ------------------------------------------------------------------------------------------------------- whole runs

SMALL = ("--batch-size", 2, "--seq-len", 32, "--save-every", 4, "--vocab-size", 400, "--device", "cpu", "--steps", 6)
KILLED = """
import os, signal, sys
from tigon.cli import closing, main
closing.move_in = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def finished(tigon, text, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    tigon("train", "--model", "llama-tiny", "--data", text, "--output", output, *SMALL).ok()
    return output


def test_a_run_that_was_killed_at_its_end_is_closed_by_resume(tigon, text, tmp_path, finished):
    """From elsewhere: paths that were relative to the working directory of the first command are found."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "words.txt").write_text(text.read_text())
    arguments = ["train", "--model", "llama-tiny", "--data", "words.txt", "--output", "run", *map(str, SMALL)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment(), cwd=here, capture_output=True)
    output = here / "run"
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (output / "checkpoint-6").exists()
    assert not (output / "model.safetensors").exists()
    assert not is_closed(output, 6)
    resume = ("train", "--resume", "--output", "../here/run")
    said = tigon(*resume, cwd=elsewhere).ok().out
    assert "all steps are done" in said
    assert f"final loss {losses(output)[6]:.4f} at step 6" in said
    left = {name: data for name, data in contents(output).items() if "checkpoint" not in name}
    right = {name: data for name, data in contents(finished).items() if "checkpoint" not in name}
    assert left.keys() == right.keys()
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "loss.png"):
        assert left[name] == right[name], name
    tigon(*resume, cwd=elsewhere).problem("is at its end, step 6")


def test_a_second_run_in_a_folder_gets_a_sentence(tigon, text, tmp_path, finished):
    before = contents(finished)
    arguments = ("train", "--model", "llama-tiny", "--data", text, "--output", finished)
    with Claim() as claim:
        claim.take(finished)
        for more in ((*arguments, "--overwrite"), arguments, ("train", "--resume", "--output", finished, "--steps", 9)):
            tigon(*more).problem("another run is at work in", f"process {os.getpid()} on")
    assert contents(finished) == before


def test_overwrite_replaces_a_run_and_keeps_what_is_beside_it(tigon, text, tmp_path, finished):
    """In a folder whose name has what rich, emoji and matplotlib would read as markup."""
    output = whole_run(tmp_path / "[bold]x[" / "nope] :smile: $\\frac{", steps=(8, 12))
    (output / "notes.txt").write_text("mine")
    (output / "run.json.partial").write_text("{")  # of a run that was killed
    done = tigon("train", "--model", "llama-tiny", "--data", text, "--output", output, *SMALL, "--overwrite").ok()
    assert f"the model is in {output}, its losses in {output}/metrics.jsonl" in done.out
    assert {path.name for path in output.iterdir()} == {path.name for path in finished.iterdir()} | {"notes.txt"}
    assert json.loads((output / "run.json").read_text())["closed"] == 6
