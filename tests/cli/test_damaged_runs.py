"""Every file of every kind of run, damaged in ten ways: a command says so in a sentence, or gives its right answer."""

import json
import shutil

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib", "transformers", "sklearn", "typer"):
    pytest.importorskip(package)
import pyarrow.parquet as parquet  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from command import run_here, write_model  # noqa: E402

from tigon import cli, compress, graph  # noqa: E402
from tigon.files import DamagedFileError  # noqa: E402
from tigon.rank.models.prompt import PromptRanker  # noqa: E402


def missing(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def appended(file):
    file.write_bytes(file.read_bytes() + b"more")


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-len(content) // 3] ^= 1
    file.write_bytes(content)


def zeros(file):
    file.write_bytes(bytes(file.stat().st_size))


def another_type(file):
    file.write_bytes(b"[1, 2]")


def deep(file):
    file.write_bytes(b'{"a":' * 200_000)


def surrogate(file):
    file.write_bytes(b'{"kind": "\\ud800", "files": {}, "options": {"seed": "\\ud800"}}')


def folder(file):
    file.unlink()
    file.mkdir()


DAMAGES = (missing, empty, cut, appended, flipped, zeros, another_type, deep, surrogate, folder)


def run(*arguments):
    """Status, standard output and standard error of a command, in this process."""
    done = run_here(*arguments)
    return done.code, done.out, done.err


def scores(folder, *options):
    """Scores of a ranker, as they are written."""
    output = folder.parent / "scores.jsonl"
    output.unlink(missing_ok=True)
    status, _, err = run(
        "rank", "score", folder, "--data", folder.parent / "shown.parquet", "-o", output, "--device", "cpu", *options
    )
    return status, output.read_text() if output.exists() else "", err


def explored(folder):
    return scores(folder, "--explore", 1)


def go_on(folder):
    output = folder.parent / "next"
    shutil.rmtree(output, ignore_errors=True)
    status, _, err = run("rank", "fit", "--from", folder, "--data", folder.parent / "shown.parquet", "-o", output,
                         "--epochs", 1, "--draws", 0, "--no-save-priors", "--device", "cpu")  # fmt: skip
    results = output / "results.json"
    measured = json.loads(results.read_text())["validation"] if results.exists() else ""
    return status, measured, err


def found(folder):
    status, out, err = run("retrieve", "search", folder, "--like", 3, "-k", 3, "--json")
    return status, out, err


def probed(folder):
    status, out, err = run("graph", "probe", folder, "--json")
    return status, out, err


def encoded(folder):
    """The weights of a graph encoder."""
    try:
        return 0, graph.G2R.from_pretrained(folder / "seed-0").state_dict(), ""
    except ValueError as error:
        return 2, "", f"tigon: {error}"


def opened(folder):
    """The weights of a compressed model."""
    try:
        model = compress.load(folder)
    except ValueError as error:
        return 2, "", f"tigon: {error}"
    return 0, {name: value.clone() for name, value in model.state_dict().items()}, ""


def loaded(folder):
    """The weights of a model of `tigon train`."""
    from tigon.cli.model import find_model, load_model, load_tokenizer

    try:
        model = load_model(find_model(str(folder)), torch.float32)
        tokenizer = load_tokenizer(str(folder), "model")
    except (cli.Problem, DamagedFileError) as error:
        return 2, "", f"tigon: {error}"
    return 0, {"ids": tokenizer("a text")["input_ids"], **model.state_dict()}, ""


FIT = ("rank", "fit", "--epochs", 1, "--batch-size", 16, "--draws", 0, "--device", "cpu", "--val-fraction", 0.2)
LIRANK = ("--model", "lirank", "--width", 4, "--mlp", 8, "--rank", 2)


def write_prompt_ranker(place, model):
    told = {
        "instruction": "Items.", "candidate": "Item {{ item_id }}.",
        "columns": {"request": "session_id", "item": "item_id"},
        "tasks": {"click": {"question": "Clicked?", "answers": {"yes": 1, "no": 0}, "label": "click"}},
    }  # fmt: skip
    ranker = PromptRanker(
        transformers.AutoModelForCausalLM.from_pretrained(model),
        transformers.AutoTokenizer.from_pretrained(model),
        told,
    )
    ranker.save_pretrained(place)


def write_train_run(place, text):
    from tigon.cli.train.run import seal_model

    write_model(place, text)
    seal_model(place)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """A run of each kind, by its name, with what is asked of it."""
    place, draw = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    request = np.arange(40).repeat(3)
    shown = {"session_id": request, "user_id": request % 5, "item_id": draw.integers(9, size=120),
             "timestamp": request * 60, "click": draw.integers(2, size=120)}  # fmt: skip
    parquet.write_table(pa.table(shown), place / "shown.parquet")
    parquet.write_table(pa.table({"id": np.arange(9), "v": draw.random((9, 4)).tolist()}), place / "items.parquet")
    edges, halves = draw.integers(0, 30, (2, 90)), {"train": np.arange(15), "test": np.arange(15, 30)}
    np.savez(place / "graph.npz", x=draw.random((30, 4)), edge_index=edges, y=np.arange(30) % 2, **halves)
    commands = {
        "ligr": (*FIT, "--width", 8, "--layers", 1, "--heads", 1, "--history", "self"),
        "lirank": (*FIT, *LIRANK),
        "adagrad": (*FIT, *LIRANK, "--table-optimizer", "row-adagrad"),
        "towers": ("retrieve", "train", "--dim", 4, "--epochs", 2, "--hops", 1, "--device", "cpu", "--val-fraction", 0),
        "graph": ("graph", "fit", "--epochs", 2, "--hidden", 4, "--out", 2, "--device", "cpu"),
        "index": ("retrieve", "build", place / "items.parquet"),
    }  # fmt: skip
    data = {"towers": [place / "shown.parquet"], "graph": ["--data", place / "graph.npz"], "index": []}
    for name, command in commands.items():
        own = data.get(name, ["--data", place / "shown.parquet"])
        status, _, err = run(*command, *own, "-o", place / name)
        assert status == 0, err
    write_train_run(place / "train", text)
    write_prompt_ranker(place / "prompt", place / "train")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "train")
    compress.feed_forward(model, torch.arange(400).view(4, 100), budget=0.4)
    compress.save(model, place / "compressed")
    return place


INDEX = ("snapshot-000001/manifest.json", "snapshot-000001/items.safetensors")
# By the kind of run, what is asked of it, and the files that are damaged.
MODEL = ("model/config.json", "model/schema.json", "model/model.safetensors", "model/manifest.json")
RUN = ("run.json", *MODEL)  # the other files are for people
ASKED = {
    "ligr": (scores, RUN), "lirank": (scores, ("model/schema.json", "model/model.safetensors")),
    "adagrad": (scores, ("model/config.json", "model/model.safetensors")),
    "lirank explored": (explored, ("model/explorer.safetensors",)),
    "lirank from": (go_on, ("model/config.json", "model/priors.safetensors")),
    "prompt": (scores, ("prompt.yaml", "ranker.json", "config.json", "model.safetensors", "tokenizer.json")),
    "towers": (lambda folder: found(folder / "items.index"), ("towers.safetensors", f"items.index/{INDEX[1]}")),
    "index": (found, INDEX),
    "graph": (probed, ("run.json", "seed-0/embeddings.safetensors", "seed-0/manifest.json")),
    "graph model": (encoded, ("seed-0/model.safetensors", "seed-0/config.json", "seed-0/manifest.json")),
    "compressed": (opened, ("config.json", "model.safetensors", "manifest.json")),
    "train": (loaded, ("config.json", "model.safetensors", "tokenizer.json", "manifest.json")),
}  # fmt: skip


def same(a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(
            torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
        )
    return a == b


@pytest.mark.parametrize("kind", ASKED)
def test_a_damaged_file_is_said_or_changes_nothing(kind, runs):
    ask, names = ASKED[kind]
    whole = runs / kind.split()[0]
    status, right, err = ask(whole)
    assert status == 0, err
    place, refused, wrong = runs / "damaged", 0, []
    for name in names:
        for damage in DAMAGES:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(whole, place)
            damage(place / name)
            try:
                status, answer, err = ask(place)
            except Exception as error:
                wrong.append((name, damage.__name__, repr(error)[:300]))
                continue
            lines = err.strip().splitlines()
            said = status == 2 and lines[-1].startswith("tigon: ") and "Traceback" not in err and not answer
            refused += said
            if not said and not (status == 0 and same(answer, right)):
                wrong.append((name, damage.__name__, status, lines[-1:], str(answer)[:100]))
    assert not wrong, "\n".join(map(str, wrong))
    assert refused > 0
