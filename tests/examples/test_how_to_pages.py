"""The code of the how-to pages runs as a reader runs it, and what they quote of the library is in it.

"path/to/model" is a directory here, with a small Llama and its tokenizer.
"""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"
SMALL = """
import small_model
small_model.model().save_pretrained("path/to/model")
small_model.tokenizer().save_pretrained("path/to/model")
"""


def blocks(page):
    """Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


def whole(page):
    """The blocks that stand by themselves or go on from the one before; not those that show a line or two."""
    return [block for block in blocks(page) if "import " in block or block.startswith("model.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, example):
    """A reader's, with the model in it."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("reader")
    (folder / "small.py").write_text(SMALL)
    example(folder / "small.py", folder)
    return folder


@pytest.fixture(scope="module")
def run(folder, example):
    def run(code):
        (folder / "train.py").write_text(code)
        return example(folder / "train.py", folder)

    return run


def test_adapters(run):
    pytest.importorskip("peft")
    said = run("\n".join(block for block in whole("lora") if "BitsAndBytesConfig" not in block))
    assert "PeftModelForCausalLM: 26 parts fused" in said
    assert re.search(r"Ran in the last step: head 1.*Recompute auto: product, as [1-9]", said), said


def test_adapters_on_4_bit_weights(run):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    (code,) = (block for block in blocks("lora") if "BitsAndBytesConfig" in block)
    said = run(code)
    assert re.search(r"adapters fused +6 × Linear4bit +ran \d+ +LoRA: q_proj, k_proj, v_proj in one", said), said


def test_scripts_of_unsloth(run):
    pytest.importorskip("trl", minversion="1.16")
    pytest.importorskip("bitsandbytes")
    said = run("\n".join(whole("from-unsloth")))
    assert re.search(r"adapters fused +4 × Linear4bit +ran \d+ +LoRA: gate_proj, up_proj in one", said), said
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_a_model_of_your_own(run):
    said = run("\n".join(blocks("own-model")))
    losses = [float(x) for x in re.findall(r"^step \d+  loss ([\d.]+)", said, re.MULTILINE)]
    assert losses[-1] < 0.7 * losses[0]
    (report,) = re.findall(r"^```text\n(.*?)^```$", (PAGES / "own-model.md").read_text(), re.MULTILINE | re.DOTALL)
    assert report in said


def test_preferences(run):
    pytest.importorskip("trl", minversion="1.16")
    said = run("\n".join(whole("dpo")))
    assert "policy linear_logprob 1, reference linear_logprob 1" in said
    loss, accuracy, margin = map(float, said.splitlines()[-1].split())
    assert loss < 0.69
    assert accuracy == 1
    assert margin > 0.05


def test_rewards(run):
    pytest.importorskip("trl", minversion="1.16")
    _, *rest = blocks("grpo")
    said = run("\n".join(rest))
    assert "Ran in the last of 4 steps: policy linear_logprob 1." in said
    rewards = [float(x) for x in re.findall(r"^reward ([\d.]+)", said, re.MULTILINE)]
    assert len(rewards) == 10
    assert rewards[-1] > 2 * rewards[0]


def test_flat_minima(run):
    code, *rest = whole("sharpness")
    said = run(code)
    losses = [float(x) for x in re.findall(r"^step \d  loss ([\d.]+)", said, re.MULTILINE)]
    assert len(losses) == 4
    assert all(4 < loss < 7 for loss in losses)
    (callback,) = rest
    names = {"Trainer": lambda *_, **__: Recorded(), "model": None, "arguments": None, "dataset": None}
    exec(callback, names)
    assert names["trainer"].callbacks[0].rho == 0.05


def test_a_captured_step(run):
    (code,) = whole("cuda-graphs")
    said = run(code)
    losses = [float(x) for x in re.findall(r"^step \d+  loss ([\d.]+)  norm [\d.]+$", said, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    graphs = "2 graphs, 34 replays, 6 eager calls" if torch.cuda.is_available() else "0 graphs, 0 replays, 40 eager"
    assert f"GraphStep(step: {graphs}" in said


def test_continuations(run):
    code, own_loss, _ = blocks("shared-prefix")
    said = run(f"{code}\n{own_loss}\nprint('apart by', (answer_loss - loss).abs().item())")
    assert len(re.findall(r"^\[-[\d., -]+\]$", said, re.MULTILINE)) == 2
    assert "62 rows in place of 122" in said
    assert float(re.search(r"apart by ([\d.e-]+)", said)[1]) < 1e-5


def test_ranking_by_prompts(run):
    pytest.importorskip("pyarrow")
    pytest.importorskip("jinja2")
    ranker, tables, served = blocks("rank-by-prompts")
    spare = "tokenizer.add_special_tokens({'additional_special_tokens': ['<|item|>']})"  # the small one has none
    more = f"{spare}\nmodel.resize_token_embeddings(len(tokenizer))\nprompt = "
    said = run("\n".join((ranker.replace("prompt = ", more), tables, served)))
    assert re.search(r"\d+ rows in place of \d+, \d+% saved", said)
    assert "[{'item': 9" not in said
    assert "'title': 'Alien'" in said
    assert (PAGES / "rank-by-prompts.md").read_text().count("label: rating >= 4") == 1


class Recorded:
    """A trainer that does nothing but take callbacks."""

    def __init__(self):
        self.callbacks = []
        self.add_callback = self.callbacks.append

    def training_step(self):
        raise NotImplementedError


def test_the_reward_of_the_page():
    names = {}
    exec(blocks("grpo")[0], names)
    assert names["score"](completions=["eel", "owl"], letter=["e", "e"], prompts=["", ""]) == [2 / 3, 0.0]


def test_shards(folder, example):
    if torch.cuda.device_count() == 1:
        pytest.skip("two processes cannot share a GPU")
    (code,) = whole("several-gpus")
    (folder / "shards.py").write_text(code)
    printed = example(folder / "shards.py", folder, processes=2)
    assert len(re.findall(r"^step \d  loss 5\.\d", printed, re.MULTILINE)) == 4
    assert "Ran in the last step: head 1" in printed


def test_a_part(run):
    module, whole_part = blocks("add-a-part")
    (report,) = re.findall(r"^```text\n(.*?)^```$", (PAGES / "add-a-part.md").read_text(), re.MULTILINE | re.DOTALL)
    assert report in run(module)
    file, code = whole_part.removeprefix("# ").split("\n", 1)
    assert code in (ROOT / file).read_text(), "it is the code of a test"


@pytest.mark.parametrize("block", blocks("add-an-operator"), ids=lambda block: block.split("\n")[1].strip()[:30])
def test_the_operator_is_quoted_as_it_is(block):
    place, code = block.split("\n", 1)
    assert code.strip()
    assert code in (ROOT / place.removeprefix("# ")).read_text()
