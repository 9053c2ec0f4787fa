"""The folder for SGLang: the ids of its requests, laid out and masked as SGLang does, give the trained scores."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("jinja2")
from prompts import model, prompt, requests, tokenizer

from tigon.rank.models.prompt import PromptRanker, export_sglang


def served(plain, body, delimiter):
    """What a server computes of a body, with SGLang's sequence and positions and FlashInfer's mask."""
    ids, place = list(body["query"]), []
    for item in body["items"]:
        place.append(len(ids))
        ids += [delimiter, *item]
    place.append(len(ids))
    ids.append(delimiter)
    n, prefix = len(ids), len(body["query"])
    start = torch.tensor([max(d for d in place if d <= i) if i >= prefix else 0 for i in range(n)])
    at = torch.arange(n)
    inside = at - start  # in an item, from 0 at its delimiter
    position = torch.where(at < prefix, at, prefix + inside - 1)
    q, k = at[:, None], at[None, :]
    reads = (k <= q) & ((q < prefix) | (k < prefix) | (k > q - inside[:, None]))
    reads |= q == k  # a delimiter reads nothing of its item, and nobody reads what it becomes
    mask = torch.zeros(n, n, dtype=plain.dtype).masked_fill(~reads, torch.finfo(plain.dtype).min)
    logits = plain(
        torch.tensor([ids]), position_ids=position[None], attention_mask=mask[None, None], use_cache=False
    ).logits  # fmt: skip
    return logits[0, torch.tensor(place[1:]) - 1][:, body["label_token_ids"]].softmax(-1)


def test_a_server_would_compute_the_trained_scores(tmp_path):
    from transformers import AutoModelForCausalLM

    own = PromptRanker(model().double().eval(), tokenizer(), prompt())
    assert {file.name for file in export_sglang(own, requests(), tmp_path)} == {"sglang.json", "requests.jsonl"}
    told = json.loads((tmp_path / "sglang.json").read_text())
    assert told["delimiter_token"] == "<|unused|>"
    assert str(told["delimiter_token_id"]) in told["serve"]
    bodies = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(bodies) == 3 * 2
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    want = own.probabilities(requests())
    for t, name in enumerate(own.prompt.tasks):
        got = torch.cat([served(plain, body, told["delimiter_token_id"]) for body in bodies[t::2]])
        torch.testing.assert_close(got.float(), want[name], rtol=0, atol=1e-6)
        assert bodies[t]["label_token_ids"] == told["tasks"][name]["label_token_ids"]
    encoded = own.encoder.encode(requests()[0], labelled=False)
    assert bodies[0]["query"] == encoded.prefix
    assert bodies[1]["items"] == [suffixes[1] for suffixes in encoded.suffixes]
    assert PromptRanker.from_pretrained(tmp_path).prompt == own.prompt


def test_adapters_are_merged(tmp_path):
    peft = pytest.importorskip("peft")
    own = PromptRanker(
        peft.get_peft_model(model(), peft.LoraConfig(r=2, init_lora_weights=False)), tokenizer(), prompt()
    )
    want = own.score(requests())["like"]
    export_sglang(own, requests(), tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    got = PromptRanker.from_pretrained(tmp_path).score(requests())["like"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_tokenizer_without_a_token_to_spare(tmp_path):
    tokens = tokenizer()
    tokens.pad_token = "<|unused|>"
    with pytest.raises(ValueError, match=r"must have a special token that no prompt uses, .* has 3, all in use"):
        export_sglang(PromptRanker(model(), tokens, prompt()), requests(), tmp_path)
