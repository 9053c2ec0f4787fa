"""One side of `tigon demo`, in a separate process: trains a small Llama, and reports each step as a line of JSON.

The first line of its standard input is a specification (JSON), and each further line is the word "step" or "end". A
separate process per side gives each side its own peak of resident memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # Only events may go to the standard output, so anything that a library prints goes to the standard error.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    try:
        _train(json.loads(sys.stdin.readline()), tell)
    except BrokenPipeError:
        os._exit(1)  # the parent command has ended
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        tell("error", message=f"{type(error).__name__}: {error}")
        raise


def _train(spec: dict[str, Any], tell: Any) -> None:
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device, dtype = torch.device(spec["device"]), getattr(torch, spec["dtype"])
    torch.manual_seed(spec["seed"])
    fields = dict(spec["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config).to(device, dtype).train()
    model.config.use_cache = False
    report = None
    if spec["fused"]:
        from tigon import fuse

        fusion = fuse(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    blocks = np.load(spec["tokens"], mmap_mode="r")
    rows = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(spec["seed"])).numpy()
    batch = spec["batch_size"]
    tell("ready", parameters=model.num_parameters(), before=_resident() if device.type == "cpu" else None)
    step = 0
    while sys.stdin.readline().strip() == "step":  # else "end", or the parent command has ended
        start = time.perf_counter()
        picked = rows[np.arange(step * batch, (step + 1) * batch) % len(rows)]
        ids = torch.from_numpy(blocks[picked].astype(np.int64)).to(device)
        for group in optimizer.param_groups:
            group["lr"] = spec["lr"] * min(1.0, (step + 1) / spec["warmup"])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss waits for the step, so that the time covers the step's work and not only its launches.
        value = loss.item()
        tell("step", step=step, loss=value, seconds=time.perf_counter() - start)
        step += 1
    if spec["fused"]:
        report = fusion.report().to_dict()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident()
    tell("done", peak=peak, report=report)


def _resident() -> int | None:
    return _status("VmRSS")


def peak_resident() -> int | None:
    """The largest resident size that this process has had, in bytes; None if the system does not report it."""
    # On Linux a child inherits the parent's ru_maxrss, so the process's own counter is read instead.
    own = _status("VmHWM")
    if own is not None:
        return own
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


if __name__ == "__main__":
    main()
