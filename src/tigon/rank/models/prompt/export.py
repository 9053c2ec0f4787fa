"""Export a folder for SGLang's multi-item scoring: one /v1/score request holds a prefix and all suffixes.

SGLang lays a request out as query, delimiter, item, delimiter, item, …, delimiter. With FlashInfer's mask, an item's
tokens attend to the query and the same item, but not to delimiters or other items; each item's positions continue from
the query; an item's logits are taken at its last token. This matches the rows, positions and attention in
`tigon.SharedPrefixBatch`, so that served and trained numbers agree.

Source: SGLang, python/sglang/srt/managers/tokenizer_manager_score_mixin.py and layers/attention/flashinfer_backend.py;
https://github.com/sgl-project/sglang/pull/10979, https://github.com/flashinfer-ai/flashinfer/pull/1015
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tigon.rank.models.prompt.model import PromptRanker
from tigon.rank.models.prompt.task import NAME

REQUESTS, SERVE = "requests.jsonl", "sglang.json"
# Maximum example requests.
EXAMPLES = 100


def export_sglang(ranker: PromptRanker, requests: Any, folder: str | os.PathLike[str]) -> list[Path]:
    """Write weights, tokenizer, serving instructions, and example requests.

    Args:
        ranker: a `PromptRanker`. Adapters are merged into a copy of the weights.
        requests: a list of `Request`, or `rank.Impressions`; the first 100 become examples: a line in requests.jsonl
            per request and task, the body for POST /v1/score.
        folder: created if missing.
    Returns: the files written beside the model's.
    Raises: ValueError if the tokenizer has no unused token for the delimiter.

    sglang.json contains the delimiter's id, each task's answer ids and values, and the calibration. A score is Σ_k
    value_k p_k over the server's probabilities, then calibrated.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    encoder, prompt = ranker.encoder, ranker.prompt
    bodies, used = [], set(encoder.head) | set(encoder.tail)
    for count, request in enumerate(ranker.iterate_requests(requests)):
        encoded = encoder.encode(request, labelled=False)
        used |= {*encoded.prefix, *(token for own in encoded.suffixes for suffix in own for token in suffix)}
        for t, name in enumerate(prompt.tasks):
            bodies.append({
                "query": encoded.prefix, "items": [own[t] for own in encoded.suffixes],
                "label_token_ids": encoder.answers[name], "apply_softmax": True, "item_first": False,
                "model": place.name,
            })  # fmt: skip
        if count + 1 == EXAMPLES:
            break
    delimiter = _delimiter(ranker, used)
    _whole(ranker.model).save_pretrained(place)
    ranker.tokenizer.save_pretrained(place)
    ranker.save_settings(place)
    told = {
        "delimiter_token_id": delimiter,
        "delimiter_token": ranker.tokenizer.convert_ids_to_tokens(delimiter),
        "serve": [
            "python", "-m", "sglang.launch_server", "--model-path", str(place), "--attention-backend", "flashinfer",
            "--multi-item-scoring-delimiter", str(delimiter), "--disable-radix-cache", "--chunked-prefill-size", "-1",
        ],
        "tasks": {
            name: {
                "label_token_ids": encoder.answers[name], "answers": list(task.answers), "values": task.values,
                "calibration": ranker.calibration[name].to_json() if name in ranker.calibration else None,
            }
            for name, task in prompt.tasks.items()
        },
    }  # fmt: skip
    (place / SERVE).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(body) + "\n" for body in bodies)
    (place / REQUESTS).write_text(lines, encoding="utf-8")
    return [place / SERVE, place / REQUESTS]


def _delimiter(ranker: PromptRanker, used: set[int]) -> int:
    """A special token that no prompt can contain: never produced from text, and not in the chat template."""
    tokenizer = ranker.tokenizer
    taken = used | {token for own in ranker.encoder.answers.values() for token in own}
    taken |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    rows = ranker.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special and i < rows]
    spare: list[int] = [token for token in special if token not in taken]
    if spare:
        return spare[0]
    raise ValueError(
        f"{NAME}: the tokenizer must have a special token that no prompt uses, for the delimiter; the tokenizer has "
        f"{len(special)}, all in use. Add a token by tokenizer.add_special_tokens and resize the model's embedding."
    )


def _whole(model: Any) -> Any:
    """The model with adapters merged; a copy if there are adapters."""
    if hasattr(model, "merge_and_unload"):
        import copy

        return copy.deepcopy(model).merge_and_unload()
    return model
