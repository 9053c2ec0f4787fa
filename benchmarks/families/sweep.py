"""Every class of transformers with a language head: one step plain and one fused, and the parts left, with reasons.

    python benchmarks/families/sweep.py --json benchmarks/families    all classes, in a process of its own that may die
    python benchmarks/families/sweep.py --only LlamaForCausalLM       one, with its traceback
    python benchmarks/families/sweep.py --shard 2/4                   a quarter
    python benchmarks/families/sweep.py --packed                      packed batches, compared with separate documents

A folder gets a file that is named after the version of transformers.

A class counts as equal when the fused loss and every gradient agree with the plain ones to fp32 rounding, and the plain
model is back, bit for bit, after remove(). How much rounding alone moves a gradient is measured: the plain model runs
three times more, with each weight moved by one unit in the last place, up or down.

Models of images and sound get both where a shape is found that they take (media.py). `media` of a record says so:
"with pixels", "with sound", or "text alone" and why.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}
SECONDS = 240  # for one class


def classes() -> dict[str, dict[str, Any]]:
    """Names of all classes, in order, with the tasks and the model types that transformers lists them under."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, Any]] = {}
    for task, mapping in TASKS.items():
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            for name in [names] if isinstance(names, str) else names:
                row = found.setdefault(name, {"tasks": [], "model_types": []})
                row["tasks"] += [task] if task not in row["tasks"] else []
                row["model_types"] += [model_type] if model_type not in row["model_types"] else []
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------------------- one class


def examine(name: str) -> dict[str, Any]:
    """The record of one class, with the keys that this function sets."""
    import torch

    import tigon

    try:
        transformers = importlib.import_module("transformers")
        model_class = getattr(transformers, name)
    except (ImportError, AttributeError) as error:
        return {"status": "not run", "why": _sentence(error)}
    try:
        from media import with_media
        from tiny import tiny_inputs, tiny_model

        model = tiny_model(model_class)
        inputs, media = with_media(model, tiny_inputs(model), _step)
        before = {n: set(vars(m)) for n, m in model.named_modules()}
        plain = _step(model, inputs)
        hooked = {
            n: set(vars(m)) - before.get(n, set()) for n, m in model.named_modules()
        }  # attributes that the model itself adds
        if not torch.isfinite(plain[0]) or not plain[1]:
            return {"status": "not run", "why": "its loss is not finite, or has no gradient"}
        if not _same(_step(model, inputs), plain):
            return {"status": "not run", "why": "two runs of the plain model differ"}
        moved = [_move_inputs(model, inputs, seed) for seed in range(2, 5)]
    except Exception as error:
        if os.environ.get("SWEEP_TRACEBACK"):
            traceback.print_exc()
        return {"status": "not run", "why": _sentence(error)}

    try:
        fusion = tigon.fuse(model)
        fused = _step(model, inputs)
    except Exception as error:
        traceback.print_exc()
        return {"status": "wrong", "why": f"raises when fused: {_sentence(error)}"}
    report = fusion.report()
    fusion.remove()
    record: dict[str, Any] = {"status": "equal", "why": ""}
    wrong = _differences(fused, plain, moved)
    if not _same(_step(model, inputs), plain):
        wrong.append("after remove() the model is not the plain one")
    wrong += [
        f"remove() left something on {n}"
        for n, m in model.named_modules()
        if set(vars(m)) - before.get(n, set()) - hooked[n]
    ]
    if wrong:
        record |= {"status": "wrong", "why": "; ".join(wrong[:4])}
    if media:
        record["media"] = media
    record["calls"] = dict(report.calls)
    record["logits_built_by"] = dict(report.logits_built_by)
    record["fused"] = [[r.kind, r.name, r.count, r.what] for r in report.fused_rows]
    record["left"] = [[r.kind, r.name, r.count, r.what] for r in report.skipped_rows]
    return record


def examine_packs(name: str) -> dict[str, Any]:
    """Whether a class, fused, gives for a packed batch what it gives for separate documents. `why` names its leaks."""
    import torch
    import transformers

    import tigon
    from tigon.fusion.documents.leaks import find_leaks

    try:
        from tiny import WORDS, tiny_model

        model = tiny_model(getattr(transformers, name)).eval()
        generator = torch.Generator().manual_seed(1)
        documents = [torch.randint(WORDS.start, WORDS.stop, (1, n), generator=generator) for n in (7, 1, 9, 5)]
        offsets = torch.tensor([0, 7, 8, 17, 22], dtype=torch.int32)
        with torch.no_grad():
            apart = torch.cat([model(input_ids=ids).logits[0] for ids in documents])
    except Exception as error:
        return {"status": "not run", "why": _sentence(error)}
    leaks = find_leaks(model)
    packed = {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None],
    }
    fusion = tigon.fuse(model)
    try:
        with torch.no_grad():
            runs = [model(**packed).logits[0], model(**packed, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).logits[0]]
    except Exception as error:  # transformers itself raises for some recurrences
        return {"status": "leaks" if leaks else "wrong", "why": "; ".join([*leaks[:2], _sentence(error)])}
    is_apart = all(float((run - apart).abs().max()) <= 2e-5 * float(apart.abs().max()) for run in runs)
    status = "leaks" if leaks else "equal" if is_apart else "wrong"
    why = "; ".join([*leaks[:2], *(["yet documents stay apart"] if is_apart and leaks else [])])
    left = [[r.kind, r.name, r.count, r.idle or r.what] for r in fusion.report().rows if r.kind == "documents"]
    calls = {"documents": fusion.report().calls.get("documents", 0)}
    return {"status": status, "why": why, "calls": calls, "left": [] if calls["documents"] else left}


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _step(model: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.arange(logits[..., 0].numel()) % 89)
    loss = loss.sum()
    loss.backward()
    return loss.detach().clone(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _same(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one[0], other[0]) and one[1].keys() == other[1].keys() and all(
        torch.equal(g, other[1][n]) for n, g in one[1].items()
    )  # fmt: skip


def _move_inputs(model: Any, inputs: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients with every weight moved by one unit in the last place."""
    import torch

    kept = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * (2 * torch.randint(0, 2, p.shape, generator=generator) - 1))
    try:
        return _step(model, inputs)
    finally:
        with torch.no_grad():
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(value)


def _differences(fused: Any, plain: Any, moved: Any) -> list[str]:
    """A few fp32 roundings of the largest gradient, or four times what moving the weights by one of them does."""
    wrong = []
    error, *roundings = (abs(float(run[0] - plain[0])) for run in (fused, *moved))
    rounding = max(roundings)
    if not error <= 2e-6 * abs(float(plain[0])) + 4 * rounding:
        wrong.append(f"loss {float(fused[0]):.8f}, plain {float(plain[0]):.8f}")
    if fused[1].keys() != plain[1].keys():
        wrong.append(f"gradients of other parameters: {sorted(fused[1].keys() ^ plain[1].keys())[:3]}")
        return wrong
    largest = max(float(g.abs().max()) for g in plain[1].values())
    for name, g in plain[1].items():
        runs = (fused[1][name], *(run[1].get(name, g) for run in moved))
        error, *roundings = (float((run - g).abs().max()) for run in runs)
        rounding = max(roundings)
        if not error <= 3e-6 * float(g.abs().max()) + 1e-7 * largest + 4 * rounding:
            wrong.append(
                f"gradient of {name} differs by {error:.1e} of {float(g.abs().max()):.1e} (rounding {rounding:.1e})"
            )
    return wrong


# ------------------------------------------------------------------------------------------------------ all of them


def work() -> None:
    """The process that may die: reads "step" or "packed" and a class's name per line, and writes a record per line."""
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only records may go to the standard output
    for line in sys.stdin:
        kind, _, name = line.strip().partition(" ")
        out.write(json.dumps((examine_packs if kind == "packed" else examine)(name)) + "\n")
        out.flush()
        gc.collect()


class Worker:
    """One process of work(), started anew when a class has killed it or has taken too long."""

    def __init__(self, quiet: bool, kind: str) -> None:
        self.quiet, self.kind = quiet, kind
        self.process: subprocess.Popen[str] | None = None

    def examine(self, name: str) -> dict[str, Any]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL if self.quiet else None,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.kind} {name}\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.process.kill()
        code = self.process.wait()
        self.process = None
        return {"status": "not run", "why": f"ended the process ({code})" if ready else f"took more than {SECONDS} s"}

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def sweep(names: list[str], *, quiet: bool = True, kind: str = "step") -> dict[str, Any]:
    worker, rows = Worker(quiet, kind), {}
    known = classes()
    for name in names:
        rows[name] = known.get(name, {}) | worker.examine(name)
        print(one_line(name, rows[name]), flush=True)
    worker.end()
    return rows


def one_line(name: str, row: dict[str, Any]) -> str:
    media = f"  {row['media']}" if row.get("media") else ""
    what = row["why"] or " ".join(f"{k} {n}" for k, n in row["calls"].items())
    left = {f"{kind} {why}" for kind, _, _, why in row.get("left", [])}
    built = f"  built by {', '.join(row['logits_built_by'])}" if row.get("logits_built_by") else ""
    return f"{name:<44} {row['status']:<8} {what}{built}{media}" + "".join(
        f"\n{'':<54}left: {text}" for text in sorted(left)
    )


def write(path: Path, versions: dict[str, str], rows: dict[str, Any]) -> None:
    """Write one class per line, so that two files can be compared line by line."""
    if path.is_dir():
        path = path / f"transformers-{versions['transformers']}.json"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    path.write_text(f'{{"versions": {json.dumps(versions)},\n"classes": {{\n{lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CLASS")
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--packed", action="store_true", help="packed batches, of classes with a causal head")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    import torch
    import transformers

    at, of = map(int, options.shard.split("/"))
    tasks = {"causal", "image", "multimodal"} if options.packed else set(TASKS)
    names = options.only or [name for name, row in classes().items() if tasks & {*row["tasks"]}][at - 1 :: of]
    if options.only:
        os.environ["SWEEP_TRACEBACK"] = "1"
    rows = sweep(names, quiet=not options.only, kind="packed" if options.packed else "step")
    print(Counter(row["status"] for row in rows.values()))
    if options.json:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
        write(options.json, versions, rows)


if __name__ == "__main__":
    main()
