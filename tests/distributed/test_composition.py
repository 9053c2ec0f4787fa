"""A fused model trains on several processes as a plain one does on one: every loss, every gradient, by every engine.

The measure is fp64 on one process. fp32 on one process misses it by a little, and so does the plain model under an
engine that computes in bf16; the fused model under the engine may miss it by twice as much (tests/numerics.py).

TIGON_TEST_RECORD=file.json writes what was found, a row a case; `make gpu-test-distributed` does.
"""

import pytest
import torch
from engines import ENGINES, alone, train
from numerics import Errors
from world import GPUS, world_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("distributed")
two, four = world_of(2), world_of(4)

# Sums over rows, ranks and micro-batches are added in another order, and a step of the optimizer lies between.
ROUNDINGS = 32
# In bf16, of the loss: the mean of what many tokens' roundings did to it, an eighth of one, whichever way it falls.
ROUNDINGS_BF16 = 2**12
# On a CPU, where processes are slow, one engine for each mechanism; and engines by which the plain model is held
# to the same, and by which fusing after the engine differs from fusing before. On GPUs all are tried.
BEFORE = {
    "DDP, static graph", "DDP, gradients as views", "DDP, tied embeddings", "DDP, accumulation", "DDP, bf16 autocast",
    "FSDP2, one group", "FSDP2, tied embeddings", "FSDP2, head alone, kept", "FSDP2, head and embedding alone",
    "FSDP2, resharded to pairs",
    "FSDP2, head alone, checkpointing", "FSDP2, head alone, bf16, accumulation", "HSDP, head alone, accumulation",
    "TP, tied embeddings", "TP, sequence parallel, and FSDP2", "CP, keys and values gathered",
    "FSDP2, adapters, checkpointing", "FSDP2, adapters, accumulation", "FSDP2, adapters, each layer of them alone",
    "FSDP2, A and B alone", "FSDP1, head alone, accumulation",
    "DDP, experts", "FSDP2, experts, checkpointing", "FSDP2, experts, accumulation", "FSDP2, experts, bf16",
    "DDP, experts in nf4", "FSDP2, experts in nf4 alone", "FSDP2, experts in mxfp4, checkpointing",
    "FSDP2, experts in nf4, bf16",
}  # fmt: skip
PLAIN = {"TP, sequence parallel, and FSDP2", "CP, keys and values gathered"}
AFTER = {"DDP", "FSDP2, head alone", "FSDP2, head with the norm", "FSDP2, experts in nf4 alone"}


def cases():
    for name, engine in ENGINES.items():
        if GPUS or not engine.cuda:
            for size in engine.gpu_worlds if GPUS else engine.worlds[:1]:
                for fused, known in (("", PLAIN), ("before", BEFORE), ("after", AFTER)):
                    if fused == "after" and not engine.after:
                        continue
                    if (GPUS or name in known) and (fused or not engine.bf16):
                        yield pytest.param(name, size, fused, id=f"{name}-{size}-{fused or 'plain'}")


@pytest.fixture(scope="module")
def measures():
    """What has been computed already: the numbers of one process, and of plain bf16."""
    return {}


def once(measures, world, function, *arguments):
    engine = ENGINES[arguments[-1] if function is alone else arguments[0]]
    same = (world.size, *arguments)
    if function is alone:
        same = (arguments[0], engine.steps, engine.lr, engine.tied, engine.adapters is None, engine.experts)
    key = function, *same
    if key not in measures:
        measures[key] = world.run(function, *arguments)[0]
    return measures[key]


def errors(found, truth):
    compared = Errors()
    compared.add(found, truth)
    return compared


@pytest.mark.parametrize(("name", "size", "fused"), list(cases()))
def test_losses_and_gradients_of_one_process(request, measures, record, name, size, fused):
    if ENGINES[name].needs:
        pytest.importorskip(ENGINES[name].needs)
    if ENGINES[name].adapters is not None:
        pytest.importorskip("peft")
    world, engine = request.getfixturevalue({2: "two", 4: "four"}[size]), ENGINES[name]
    truth = once(measures, world, alone, torch.float64, name)
    got = once(measures, world, train, name, fused)
    if engine.bf16:
        eager = once(measures, world, train, name, "")["numbers"]
    else:
        eager = once(measures, world, alone, torch.float32, name)
    ours, theirs = errors(got["numbers"], truth), errors(eager, truth)
    side = f"fused {fused}" if fused else "plain"
    record(engine=name, world=size, side=side, logits="–", **largest(ours), eager=largest(theirs))
    ours.assert_at_most_twice(theirs, ROUNDINGS_BF16 if engine.bf16 else ROUNDINGS)
    if fused:
        report = got["report"]
        record(logits="real: " + "; ".join(report["unfused_heads"]) if report["unfused_heads"] else "none")
        assert min(report["calls"][kind] for kind in ("norm", "mlp", "rotary")) > 0
        assert not report["logits_built_by"]
        # Without logits, or the report says why not.
        assert report["calls"].get("head", 0) == (0 if report["unfused_heads"] else 1)
        assert engine.tp or not report["unfused_heads"]
        ran = report["calls"].get("adapters", 0) + report["calls"].get("expert_adapters", 0)
        # A checkpoint runs a layer again; of an accumulating step the last micro-batch is counted.
        assert (ran >= engine.adapters) if engine.adapters else not ran, (ran, report["unfused_adapters"])
        rows = [row for row in report["rows"] if row["kind"] == "adapters" and not row["fused"]]
        why = [*report["unfused_adapters"], *(row["what"] for row in rows)]
        assert [engine.left in what for what in why] == ([True] if engine.left else [])


@pytest.mark.parametrize("name", ["FSDP2, adapters"])
def test_ranks_with_unlike_batches_may_choose_unlike_levels(two, name):
    """recompute="auto" chooses by a rank's own tokens: recipes call no collective, and change no bit."""
    same = two.run(train, name, "before", ("cheap",))[0]
    unlike = two.run(train, name, "before", ("cheap", "product"))[0]
    assert same["numbers"].keys() == unlike["numbers"].keys()
    for key, value in same["numbers"].items():
        assert torch.equal(value, unlike["numbers"][key]), key
    assert min(found["report"]["tensors_not_kept"] for found in (same, unlike)) > 0


def largest(errors):
    """Of the losses, and of any gradient, relative to its largest element."""
    relative = {
        name: float(torch.cat(parts).max() / torch.cat(errors.sizes[name]).max())
        for name, parts in errors.errors.items()
    }
    loss = relative.pop("loss")
    return {"loss_error": loss, "gradient_error": max(relative.values())}
