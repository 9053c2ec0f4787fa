"""What the code of a page has to lead to, beyond running: of a page, CHECKS has a function of its namespace and output.

BEFORE has what a page is spared, because a test of its own has it and it takes seconds.
"""

import re
from pathlib import Path
from types import SimpleNamespace as Namespace

import torch

DOCS = Path(__file__).parents[2] / "docs"
CHECKS, BEFORE = {}, {}


def check(*pages):
    return lambda function: CHECKS.update(dict.fromkeys(pages, function))


def before(*pages):
    return lambda function: BEFORE.update(dict.fromkeys(pages, function))


def text_blocks(page: str) -> list[str]:
    """What the page shows of the output of its code."""
    return re.findall(r"^```text\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def find_numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output, re.MULTILINE)]


# ------------------------------------------------------------------------------------------------------ before a page


@before("how-to/rank-sequences.md", "rank/fit.md")
def export_no_ligr():
    from tigon import rank

    def export(ranker, folder):
        Path(folder).mkdir()
        return Path(folder), Path(folder)

    rank.export = export


@before("how-to/rank-clicks.md")
def export_no_lirank():
    from tigon import rank

    rank.export = lambda ranker, folder: (Path(folder),)


@before("how-it-works/recompute.md", "how-to/long-context.md", "how-to/lora.md")
def name_checkpointing_as_today():
    """Before transformers 5.23 the method has another name, which how-to/memory.md tells."""
    from transformers import PreTrainedModel

    def enable(self, activation_checkpointing_kwargs=None):
        self.gradient_checkpointing_enable(gradient_checkpointing_kwargs=activation_checkpointing_kwargs)

    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        PreTrainedModel.activation_checkpointing_enable = enable


# ------------------------------------------------------------------------------------------------------------- training


@check("index.md")
def check_index(page: Namespace, output: str):
    assert "LlamaForCausalLM: 30 parts fused" in output
    assert "head 1" in output
    assert Path("tigon-run/model.safetensors").exists()
    assert not hasattr(page.model, "_tigon_fusion")  # the block has ended


@check("how-to/lora.md")
def check_lora(page: Namespace, output: str):
    assert "PeftModelForCausalLM: 54 parts fused" in output
    assert re.search(r"Ran in the last step: head 1.*adapters", output), output
    if hasattr(page, "four_bit"):
        assert re.search(r"adapters fused +12 × Linear4bit +ran \d+ +LoRA: q_proj, k_proj, v_proj in one", output)


@check("how-to/chats-to-adapter.md")
def check_chats(page: Namespace, output: str):
    assert len(page.held_out) == 2
    assert page.held_out[-1] < page.held_out[0]
    assert page.answer.shape[1] > page.prompt["input_ids"].shape[1]
    assert "merged: LoRA of rank 16 merged into path/to/model, in float32" in output
    assert "The merged model is as near as rounding allows" in output
    assert Path("merged/manifest.json").is_file()


@check("how-to/from-unsloth.md")
def check_unsloth(page: Namespace, output: str):
    if hasattr(page, "four_bit"):
        assert re.search(r"adapters fused +8 × Linear4bit +ran \d+ +LoRA: gate_proj, up_proj in one", output), output
        losses = find_numbers(r"'loss': '?([\d.]+)", output)
        assert len(losses) == 8
        assert losses[-1] < losses[0]


@check("how-to/own-model.md")
def check_own_model(page: Namespace, output: str):
    losses = find_numbers(r"^step \d+  loss ([\d.]+)", output)
    assert losses[-1] < 0.7 * losses[0]
    (report,) = text_blocks("how-to/own-model.md")
    assert report in output


@check("how-to/add-a-part.md")
def check_part(page: Namespace, output: str):
    (report,) = text_blocks("how-to/add-a-part.md")
    assert report in output


@check("how-to/dpo.md")
def check_preferences(page: Namespace, output: str):
    assert "policy linear_logprob 1, reference linear_logprob 1" in output
    loss, accuracy, margin = map(float, output.splitlines()[-1].split())
    assert loss < 0.69
    assert accuracy == 1
    assert margin > 0.05


@check("how-to/grpo.md")
def check_rewards(page: Namespace, output: str):
    assert "Ran in the last of 4 steps: policy linear_logprob 1." in output
    assert page.score(completions=["eel", "owl"], letter=["e", "e"], prompts=["", ""]) == [2 / 3, 0.0]
    rewards = find_numbers(r"^reward ([\d.]+)", output)
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0]


@check("how-to/trl.md")
def check_trl(page: Namespace, output: str):
    first, *lines = text_blocks("how-to/trl.md")[0].splitlines()
    assert all(line in output for line in (first, *lines[:-1]))


@check("how-to/sharpness.md")
def check_flat_minima(page: Namespace, output: str):
    losses = find_numbers(r"^step \d  loss ([\d.]+)", output)
    assert len(losses) == 4
    assert all(4 < loss < 7 for loss in losses)
    assert page.trainer.callback_handler.callbacks[-1].rho == 0.05


@check("how-to/cuda-graphs.md")
def check_captured_steps(page: Namespace, output: str):
    losses = find_numbers(r"^step \d+  loss ([\d.]+)  norm [\d.]+$", output)
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    graphs = "2 graphs, 34 replays, 6 eager calls" if torch.cuda.is_available() else "0 graphs, 0 replays, 40 eager"
    assert f"GraphStep(step: {graphs}" in output


@check("how-to/shared-prefix.md")
def check_shared_prefixes(page: Namespace, output: str):
    assert len(re.findall(r"^\[-[\d., -]+\]$", output, re.MULTILINE)) == 2
    assert "62 rows in place of 122" in output
    assert abs(page.answer_loss - page.loss) < 1e-5
    assert re.search(r"Prompts computed once: \d+ rows in place of \d+", output)


@check("how-to/packing.md")
def check_training_without_padding(page: Namespace, output: str):
    shares = re.findall(r"(\d+)% of the tokens of padded batches would be padding; packed: 0%", output)
    assert len(shares) >= 2
    assert all(int(share) > 10 for share in shares)
    assert re.search(r"<PackedDataset of 16 samples in \d+ rows of 256 tokens: \d+% padding before", output)
    assert page.loss.isfinite()


@check("how-it-works/documents.md")
def check_packed_batches(page: Namespace, output: str):
    assert re.search(r"documents fused +2 × LlamaAttention +ran 2", output)


@check("how-to/several-gpus.md")
def check_shards(page: Namespace, output: str):
    assert len(find_numbers(r"^step \d  loss (5\.\d+)", output)) == 4
    assert "Ran in the last step: head 1" in output


@check("how-to/from-liger.md")
def check_liger(page: Namespace, output: str):
    assert page.model._tigon_fusion.report().fused_rows


@check("compress.md")
def check_compression(page: Namespace, output: str):
    assert "→ bits" in output
    assert abs(float(output.split()[-1]) - 34 / 120) < 1e-6
    before, after = (next(Path(name).glob("*.safetensors")).stat().st_size for name in ("path/to/model", "small"))
    assert after < before
    assert page.small.config.quantization_config.quant_method == "tigon"


@check("losses/coding-rate.md")
def check_coding_rate(page: Namespace, output: str):
    first, last, *_ = find_numbers(r"-?\d+\.\d+", output)
    assert last > first


@check("losses/preference.md", "losses/policy.md", "losses/distillation.md")
def check_losses(page: Namespace, output: str):
    assert output


# ------------------------------------------------------------------------------------------------------------ retrieval


@check("retrieve/index.md")
def check_search(page: Namespace, output: str):
    assert "GiB on the device" in output
    assert "and country is 'us'" in output
    assert (page.hits.ids % 2 == 1).all()
    assert "ids: column id" in output
    # The search of the shell finds job-7 itself nowhere, and five others that pass the filter.
    table = output.partition("$ tigon retrieve search")[2]
    assert len(re.findall(r"\bjob-\d+", table.partition("--table jobs.parquet")[2])) >= 5


@check("retrieve/links.md")
def check_links(page: Namespace, output: str):
    assert "occupation=nurse → tags=ward, +" in output
    assert (page.hits.ids >= 0).any()


@check("retrieve/filters.md")
def check_filters(page: Namespace, output: str):
    assert output.strip() == "2"


@check("retrieve/several-gpus.md")
def check_sharded_index(page: Namespace, output: str):
    assert page.hits.ids.shape == (4, 10)
    assert len(page.index) == len(page.alone) == 500
    assert page.table.grad.abs().sum() > 0


@check("how-to/from-faiss.md")
def check_faiss(page: Namespace, output: str):
    assert page.D.shape == page.I.shape == (5, 10)
    assert page.I[:, 0].tolist() == (page.xq @ page.xb.T).argmax(1).tolist()
    assert (page.hits.ids >= 0).all()


# -------------------------------------------------------------------------------------------------------------- ranking


@check("rank/index.md")
def check_ranking(page: Namespace, output: str):
    assert page.scores.grad.abs().sum() > 0
    assert page.found.left_out == 1
    low, high, _ = page.interval
    assert low <= page.found.mean <= high
    assert "left out" in output


@check("rank/data.md")
def check_tables(page: Namespace, output: str):
    # As the page says: the event of ten o'clock is not in the history of the request of ten o'clock.
    assert "Histories exclude 1 event at exactly the time of a request by the same user." in output
    assert len(page.own.split(fraction=0.5)[0]) == len(page.own.split(fraction=0.5)[1]) == 1
    assert page.later.schema == page.data.schema
    assert output.endswith("\n2 5 2\n2\n1\n")


@check("rank/fit.md")
def check_fitting(page: Namespace, output: str):
    fitted, found = page.fitted, page.found.labels["click"]["auc"]
    assert abs(found.value - max(row["auc"] for row in fitted.history)) < 1e-6
    assert found.low <= found.value <= found.high
    assert "MetricValue(value=" in output
    assert Path("scores-1.parquet").exists()


@check("rank/interactions.md")
def check_interactions(page: Namespace, output: str):
    from tigon import rank

    assert set(page.mlp.names) == {"hour", "price", "age", "country"}
    assert page.found[0].features == ("hour", "price")
    assert rank.Schema.load(Path("schema.json")) == page.schema
    assert "hour × price" in page.data.schema.rows
    assert "share" in output


@check("rank/search.md")
def check_block_search(page: Namespace, output: str):
    assert len(page.found.trials) == 4
    assert page.ranker.config.blocks[0].kind == page.first.graph[0].kind
    assert "'auc': " in output


@check("how-to/rank-sequences.md")
def check_sequences(page: Namespace, output: str):
    from tigon import rank

    assert page.data.notes == []
    assert page.scores.shape == (5,)
    assert page.cache.lengths == (5, 3)  # a context, and the events twice
    assert page.codes.shape == (2, 2)
    assert (page.place >= 1).all()
    assert type(page.ranker) is rank.LiGR
    assert output.endswith(f"(5, 3) {page.cache.nbytes}\n")


@check("how-to/rank-clicks.md")
def check_clicks(page: Namespace, output: str):
    from tigon import rank

    assert page.data.schema.roles.item is None
    assert set(page.found) == {"auc", "log_loss", "ece"}
    assert page.found["auc"].value > 0.7
    assert page.found["ece"].value < 0.15
    assert 0 < float(page.off.abs().max()) < 0.01
    tables, small = (sum(table.nbytes for table in ranker.tables()) for ranker in (page.ranker, page.small))
    assert 4 * 8 * small == (8 + 4) * tables  # of width 8
    assert type(page.ranker) is rank.LiRank
    assert page.ranker.explorer is not None
    assert 0 < float((page.drawn.score - rank.score(page.ranker, page.held).score).abs().mean()) < 0.3
    assert page.going.schema.fields["banner"].rows == 71
    assert "MetricValue(value=" in output


@check("how-to/rank-by-prompts.md")
def check_prompts(page: Namespace, output: str):
    assert re.search(r"\d+ rows in place of \d+, \d+% saved", output)
    assert "[{'item': 9" not in output
    assert "'title': 'Alien'" in output


# --------------------------------------------------------------------------------------------------------------- graphs


@check("graph.md")
def check_graphs(page: Namespace, output: str):
    before, after = map(float, output.split())
    assert before < 0.6 < before + 0.2 < after
    assert page.angles.shape == (3, 3, 4)
    assert Path("g2r/config.json").is_file()
    assert Path("angles.png").is_file()
