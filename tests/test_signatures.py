"""Public signatures: few parameters, and an error sentence for a keyword that has moved."""

import importlib
import inspect

import pytest
import torch

import tigon
from tigon.data import metrics
from tigon.graph import __all__ as graphs
from tigon.lazy import find_homes
from tigon.training import __all__ as optimizers

PUBLIC = (
    "tigon",
    "tigon.losses",
    "tigon.training",
    "tigon.retrieve",
    "tigon.rank",
    "tigon.compress",
    "tigon.data",
    "tigon.ops.fp8",
    "tigon.rank.models.prompt",
)
PACKAGES = {package: find_homes(package) for package in PUBLIC}
PACKAGES["tigon.training"] = dict.fromkeys(optimizers, "tigon.training")
PACKAGES["tigon.graph"] = dict.fromkeys(graphs, "tigon.graph")
METRICS = [name for name, f in vars(metrics).items() if inspect.isfunction(f) and not name.startswith("_")]
PACKAGES["tigon.data.metrics"] = dict.fromkeys(METRICS, "tigon.data.metrics")  # of both systems
MOST = 6
SHARE = 0.88
# Functions with more than six parameters, and the reasons.
LONG = {
    "causal_conv1d": "the arguments of torch.nn.functional.conv1d, and states and documents on both sides",
    "gated_rms_norm": "three tensors, the options of rms_norm, and the gate's by Mamba's names",
    "embedding_bag": "the arguments of torch.nn.functional.embedding_bag by their names, and the tables of fields",
    "filtered_topk": "queries, items and k, and what each row has beside its vector",
    "fuse": "which modules, and the kinds of change that a user switches on one by one",
    "fit": "what is fitted on what, and what a run that goes on takes and says",
    "item_softmax": "queries, items, targets and biases, and what a tigon.Head has of scale and group",
    "moe_mlp": "tokens, their choices, two stacks of weights, and an adapter beside each",
    "plan_memory": "what makes an index, and how long its ids are",
    "prefix_attention": "q, k, v and their layout, and the options of attention functions by their names",
    "search_blocks": "what is searched by what, where it is kept and measured, and what a search says",
    "quantized_embedding": "as embedding_bag",
    "varlen_attention": "as prefix_attention, with offsets and sinks",
    "gated_delta_rule": "q, k, v with decay and step, the options of transformers, and states and offsets",
    "mamba2_scan": "the arguments of mamba_ssm's scan by their names, and states and offsets",
    "qk_norm_rope": "six tensors, and the options of rms_norm by their names",
}
X = torch.randn(2, 4)
Q = torch.randn(1, 2, 2, 4)


def parameters_of(function):
    """A function's parameters, without keywords that are refused with a sentence."""
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]


def public_functions():
    """Every public function once, by its name."""
    values = ((name, getattr(importlib.import_module(p), name)) for p, names in PACKAGES.items() for name in names)
    return {name: value for name, value in values if inspect.isfunction(value)}


def test_most_functions_take_at_most_six_arguments():
    counts = {name: len(parameters_of(function)) for name, function in public_functions().items()}
    assert len(counts) > 35
    assert {name: n for name, n in counts.items() if n > MOST and name not in LONG} == {}
    assert all(counts[name] > MOST for name in LONG), "what became short is no exception"
    assert sum(n <= MOST for n in counts.values()) >= int(SHARE * len(counts))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tigon.kl_div(X, X, logits=True), r"kl_div: logits must be passed as temperature=1.*got logits=True"),
        (lambda: tigon.jsd(X, X, labels=X), r"jsd: labels must be passed as mask=labels != .*, got labels=a tensor\.$"),
        (lambda: tigon.tvd(X, X, ignore_index=0), r"tvd: ignore_index must be passed as mask=.*got ignore_index=0\.$"),
        (lambda: tigon.gated_mlp(X, X, X, X.t(), up_bias=None), r"up_bias must be passed as up=\(up_weight, up_bias\)"),
        (lambda: tigon.rope(Q, Q, X, X, angles="once"), r"rope: angles must be .* config=tigon.Rope\(angles=…\), got"),
        (
            lambda: tigon.qk_norm_rope(Q, Q, X[0], X[0], X, X, interleaved=True),
            r"qk_norm_rope: interleaved must be passed as config=tigon.Rope\(interleaved=…\), got interleaved=True\.$",
        ),
        (
            lambda: tigon.moe_mlp(X, X, X, Q[0], Q[0], limit=7.0),
            r"moe_mlp: limit must be passed as config=tigon.Expert\(limit=…\), got limit=7.0\.$",
        ),
        (
            lambda: tigon.moe_mlp(X, X, X, Q[0], Q[0], down_bias=X),
            r"moe_mlp: down_bias must be passed as down=\(weight, bias\), got down_bias=a tensor\.$",
        ),
        (lambda: tigon.gated_linear(X, X, X, acts="silu"), r"gated_linear: got an unexpected keyword argument 'acts'"),
    ],
)  # fmt: skip
def test_a_keyword_that_stands_elsewhere_gets_a_sentence(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()
