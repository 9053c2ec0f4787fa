"""`tigon verify MERGED --against RUN`: a merged model's logits beside those of the base model with the adapters."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tigon.cli.model import load_model, load_tokenizer
from tigon.cli.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

# A merged result may be this many times as far from the reference as the unmerged result …
FACTOR = 2.0
# … or this far, in units of the dtype's epsilon: an unmerged result may be right by chance.
FLOOR = {"float32": 32.0, "bfloat16": 1.0, "float16": 2.0}


def verify_against(options: Any, device: Any, console: Any) -> None:
    """Compare the logits of --against in a wider dtype, in the merged model's dtype, and of the merged model.

    options: a VerifyOptions. Raises Problem with code 1 if the merged model's error is more than twice the unmerged
    model's, and with code 2 for models that cannot be compared.
    """
    import torch

    from tigon.cli.fp8_noise import read_batch
    from tigon.cli.merge import find_tokenizer_place, find_trained, load_trained

    merged_source, left = find_trained("verify", options.model, None)
    if left is not None:
        raise Problem(f"verify: {options.model} holds adapters; --against compares a merged model with them")
    source, adapters = find_trained("verify", options.against, options.adapters)
    with console.status(f"reading {options.model}"):
        merged: Any = load_model(merged_source, "auto")
        merged.eval()
    dtype = merged.get_input_embeddings().weight.dtype
    name = str(dtype).removeprefix("torch.")
    if name not in FLOOR:
        raise Problem(f"verify: --against compares models in {', '.join(FLOOR)}, got {name}")
    vocab = merged.get_input_embeddings().weight.shape[0]
    if options.data is not None:
        tokenizer = load_tokenizer(find_tokenizer_place(source, adapters), "verify: --against")
        ids = read_batch(options.data, tokenizer, options.batch_size, options.seq_len, torch.device("cpu"))
    else:
        draw = torch.Generator().manual_seed(options.seed)
        ids = torch.randint(vocab, (options.batch_size, options.seq_len), generator=draw)
    found = _compute_logits(merged, ids, device)
    del merged
    with console.status(f"reading {options.against}"):
        trained = load_trained("verify", source, adapters)
    model = trained.model
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != vocab:
        raise Problem(
            f"verify: {options.model} has {vocab:,} tokens, and {options.against} {rows:,}: not the same model"
        )
    with console.status("computing the logits of base and adapters"):
        wide = torch.float64 if dtype == torch.float32 else torch.float32  # fp32 is exact beside bf16
        exact = _compute_logits(model.to(wide), ids, device)
        base = None
        if adapters is not None:
            with model.disable_adapter():
                base = _compute_logits(model, ids, device)
        unmerged = _compute_logits(model.to(dtype), ids, device)
    row = compare_logits(found, unmerged, exact, FLOOR[name] * torch.finfo(dtype).eps)
    row["error_base"] = None if base is None else _measure(base, exact)
    if options.json:
        about = {"model": options.model, "against": options.against, "dtype": name, "stored": trained.form}
        print(json.dumps({**about, **row}, indent=2))
    else:
        print(_explain(row, name, ids.numel(), "base and adapters" if adapters else "the original"))
    if not row["equal"]:
        raise Problem(
            f"{options.model} is not {options.against} merged: its logits differ by {row['error_merged']:.1e}, and "
            f"rounding to {name} explains {row['bound']:.1e}",
            code=1,
        )


def _compute_logits(model: Any, ids: Tensor, device: Any) -> Tensor:
    """Logits on the CPU, a sequence at a time."""
    import torch

    model.to(device)
    with torch.no_grad():
        rows = [model(input_ids=row.unsqueeze(0).to(device), use_cache=False).logits.cpu() for row in ids]
    return torch.cat(rows)


def compare_logits(merged: Tensor, unmerged: Tensor, exact: Tensor, floor: float) -> dict[str, Any]:
    """Relative distances from `exact` in the Euclidean norm, and how often the likeliest token is the same.

    Args:
        merged, unmerged, exact: (B, T, V), any float dtype.
        floor: a distance that is always allowed.
    """
    error_merged, error_unmerged = _measure(merged, exact), _measure(unmerged, exact)
    bound = max(FACTOR * error_unmerged, floor)
    return {
        "error_merged": error_merged, "error_unmerged": error_unmerged, "bound": bound,
        "same_token": float((merged.argmax(-1) == exact.argmax(-1)).double().mean()),
        "same_token_unmerged": float((unmerged.argmax(-1) == exact.argmax(-1)).double().mean()),
        "equal": math.isfinite(error_merged) and error_merged <= bound,
    }  # fmt: skip


def _measure(logits: Tensor, exact: Tensor) -> float:
    wide = exact.double()
    return float((logits.double() - wide).norm()) / (float(wide.norm()) or 1.0)


def _explain(row: dict[str, Any], dtype: str, count: int, original: str) -> str:
    verdict = "as near as rounding allows" if row["equal"] else "further than rounding explains"
    return (
        f"The merged model is {verdict}: over {count:,} tokens its logits in {dtype} are {row['error_merged']:.1e} "
        f"away from {original} in a wider dtype, relative to their size. Those of {original} in "
        f"{dtype} are {row['error_unmerged']:.1e} away, and twice that, {row['bound']:.1e}, is allowed. The likeliest "
        f"next token is the same for {row['same_token']:.1%} of the tokens ({row['same_token_unmerged']:.1%} unmerged)."
        f"{_explain_base(row)}"
    )


def _explain_base(row: dict[str, Any]) -> str:
    error = row["error_base"]
    if error is None:
        return ""
    so = "" if error > row["bound"] else ": so little that this comparison cannot tell a merged model from its base"
    return f" Without the adapters the logits would be {error:.1e} away{so}."
