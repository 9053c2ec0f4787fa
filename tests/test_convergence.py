"""Training with `tigon.fuse(model)` is the same training: a short `make converge`, which must also detect errors."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from convergence import Runs, judge

FILE = Path(__file__).parents[1] / "benchmarks" / "converge.py"
# A CPU multiplies bf16 slowly. Together the bf16 rows cover every part that fuse replaces, and every kind of batch.
# fp32 covers every family: packed lines for families with custom rotary embeddings, accumulated batches for families
# with custom losses. A router that chooses another expert for a token moves a short run further than its few plain runs
# show: packed qwen3_moe lines are left to `make converge`, which trains all, with more plain runs.
TRAINED = {
    "bf16": {
        "llama": ("rows", "packed", "accumulated"),
        "gemma2": ("packed",),
        "qwen3_moe": ("accumulated",),
        "gpt_neox": ("rows",),
    },
    "fp32": {
        "llama": ("rows", "packed", "accumulated"),
        "qwen3": ("packed",),
        "gemma2": ("packed", "accumulated"),
        "phi3": ("rows",),
        "granite": ("accumulated",),
        "olmo2": ("rows",),
        "qwen3_moe": ("accumulated",),
        "gpt_neox": ("packed",),
    },
}


@pytest.fixture(scope="module")
def converge():
    """The script, which is no package; in sys.modules meanwhile, where functools and dataclasses look it up."""
    spec = importlib.util.spec_from_file_location("converge_script", FILE)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def short(converge, device):
    """The short rows per dtype with their training runs: run once, and judged by several tests."""
    threads, known = torch.get_num_threads(), {}

    def rows(dtype):
        if dtype not in known:
            size = {k: v for k, v in converge.SHORT.items() if k != "plain"}
            sides = list(enumerate(converge.sides(dtype, converge.SHORT["plain"])))
            known[dtype] = []
            for family, kinds in TRAINED[dtype].items():
                for batches in kinds:
                    row = Runs(family, dtype, batches, **size)
                    runs = [converge.training(row, side, path, seed, device) for seed, (side, path) in sides]
                    row.record(runs)
                    known[dtype].append((row, runs))
        return known[dtype]

    torch.set_num_threads(1)
    yield rows
    torch.set_num_threads(threads)


def judged(rows, wrong=None, runs=None):
    """Copies of the rows, with other runs for `wrong`."""
    found = [replace(row, limits={}, reason="") for row, _ in rows]
    if wrong is not None:
        at = [row for row, _ in rows].index(wrong)
        found[at].record(runs)
    judge(found)
    return found if wrong is None else found[at]


def dtypes():
    return [pytest.param(d, marks=pytest.mark.xdist_group(f"convergence-{d}")) for d in ("fp32", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", dtypes())
def test_fused_runs_are_among_the_plain_ones(converge, short, dtype):
    rows = judged(short(dtype))
    assert [f"{row.model}, {row.batches}: {row.reason}" for row in rows if row.status != "ok"] == []
    if dtype == "fp32":
        assert {row.model for row in rows} == set(converge.FAMILIES)
    assert {row.batches for row in rows} == set(converge.BATCHES)
    # They train: a constant loss would agree with anything.
    for row in rows:
        first, *_, last = map(float, row.loss.split())
        assert last < first - 0.03, f"{row.model}, {row.batches}"


def eps_tenfold(monkeypatch):
    from tigon.fusion.parts import norm, residual_norm

    for module in (norm, residual_norm):
        for name in ("rms_norm", "add_rms_norm"):
            if hasattr(module, name):
                right = getattr(module, name)
                monkeypatch.setattr(module, name, lambda *a, right=right, **k: right(*a, **{**k, "eps": 10 * k["eps"]}))


def lost_token(monkeypatch):
    from tigon.fusion.logits import recipe

    right = recipe.linear_cross_entropy

    def wrong(x, weight, target, **options):
        target = target.clone()
        target[-2] = -100  # the last predicted token: the labels after it are padding
        return right(x, weight, target, **options)

    monkeypatch.setattr(recipe, "linear_cross_entropy", wrong)


def gradient_too_large(monkeypatch):
    from tigon.fusion.parts import norm

    right = norm.rms_norm
    scaled = lambda x, *a, **k: right(x * 1.05 - (x * 0.05).detach(), *a, **k)  # noqa: E731 (forward as it was)
    monkeypatch.setattr(norm, "rms_norm", scaled)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [eps_tenfold, lost_token, gradient_too_large])
@pytest.mark.parametrize("dtype", dtypes())
def test_wrong_operators_are_seen(converge, short, device, monkeypatch, dtype, mutate):
    rows = short(dtype)
    row, runs = next((row, runs) for row, runs in rows if (row.model, row.batches) == ("llama", "rows"))
    mutate(monkeypatch)
    at = [(run.side, run.path) for run in runs].index(("tigon", "labels"))
    wrong = converge.training(row, "tigon", "labels", at, device)
    found = judged(rows, row, [*runs[:at], wrong, *runs[at + 1 :]])
    print(dtype, mutate.__name__, found.reason)
    assert found.status == "wrong"
    assert found.reason.startswith("labels: ")
    assert "logits: " not in found.reason


@pytest.mark.slow
@pytest.mark.xdist_group("convergence-fp32")
def test_kernels_train_as_the_reference_does(converge, short, device, triton_backend):
    """Three steps with the kernels, interpreted without a GPU, compared with plain runs of three steps."""
    rows = short("fp32")
    row, runs = next((row, runs) for row, runs in rows if (row.model, row.batches) == ("qwen3", "packed"))
    few = replace(row, steps=3)
    kernels = [converge.training(few, "tigon", path, 9, device) for path in converge.PATHS]
    cut = [replace(run, losses=run.losses[:3], norms=run.norms[:3]) for run in runs]
    plain = [run for run in cut if run.side == "hf"]
    found = judged(rows, row, [*plain, *kernels])
    # Their weights come from three steps, the other runs' from all steps.
    assert all(s <= found.limits[m] for m in ("loss", "norm") for s in found.of("tigon", m)), found.scores


@pytest.mark.parametrize("batches", ["rows", "packed", "accumulated"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "granite", "olmo2", "qwen3_moe", "gpt_neox"])
def test_an_order_is_the_same_function(converge, family, batches):
    """In fp64, order and loss path leave only the differences from fp32 rounding of the loss and the angles."""
    text = converge.Text(batches, 4, 32, torch.device("cpu"))
    found = []
    for seed, path in ((None, "labels"), (1, "logits"), (2, "labels")):
        model = converge.build(family, torch.float64, torch.device("cpu"))
        if family == "qwen3_moe":
            model.set_experts_implementation("eager")  # the grouped product takes no fp64
        order = converge.Order(family, seed)
        before = order.weights(model) if seed is None else before  # noqa: F821 (from the first)
        order.apply(model)
        if seed is not None:
            assert not torch.equal(converge.Order(family, None).weights(model), before)
            torch.testing.assert_close(order.weights(model), before, rtol=0, atol=0)
        losses, norms = converge.train(model, order, text, 2, path)
        found.append((losses, norms, order.weights(model)))
    for losses, norms, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=4e-7)
        assert norms == pytest.approx(found[0][1], rel=4e-7)
        assert float((weights - found[0][2]).norm() / (found[0][2] - before).norm()) < 1e-4


def test_packed_lines_do_not_see_one_another(converge):
    """Another text before a line leaves the line's logits unchanged."""
    text = converge.Text("packed", 2, 64, torch.device("cpu"))
    (inputs,), items = text.step(0)
    assert items == int((inputs["labels"][:, 1:] != -100).sum())
    starts = (inputs["position_ids"] == 0).nonzero()
    row, second = starts[(starts[:, 1] > 4)][0].tolist()
    for family in converge.FAMILIES:
        model = converge.build(family, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            here, there = (
                model(input_ids=ids, position_ids=inputs["position_ids"]).logits[row, second:]
                for ids in (
                    inputs["input_ids"],
                    torch.where(torch.arange(64) < second, inputs["input_ids"] - 1, inputs["input_ids"]).clamp(min=0),
                )
            )
        torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
