"""One tiny Llama with batches to learn, and the check that a fused step is the plain step: for all hosts alike."""

import importlib
import sys
import types

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CALLS = {"head": 1, "norm": True, "mlp": 2, "rotary": 2}  # of one step, where nothing of the host's is in the way


def llama(seed=0):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    ).train()  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # fresh norms are all ones, under which a missing weight does not show
                p.add_(0.2 * torch.randn_like(p))
    return model


def batch(seed=1, rows=2, length=19):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 89, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, inputs):
    """Loss and gradients of the parameters that have one."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(fused, plain):
    """Loss and gradients to a few fp32 roundings of the largest of them."""
    torch.testing.assert_close(fused[0], plain[0], rtol=2e-6, atol=0)
    assert fused[1].keys() == plain[1].keys()
    assert plain[1]
    largest = max(g.abs().max() for g in plain[1].values())
    for name, g in plain[1].items():
        assert (fused[1][name] - g).abs().max() <= 3e-6 * g.abs().max() + 1e-7 * largest, name


def ran(fusion):
    """How often each kind ran in the last step; of norms whether, since some of them run as part of a sum."""
    calls = {kind: n for kind, n in fusion.report().calls.items() if kind in CALLS and n}
    return {kind: True if kind == "norm" else n for kind, n in calls.items()}


def ran_in_fp8(fusion):
    """The calls in FP8 in the last step: of three products in each decoder layer but the first."""
    return sum(row.calls for row in fusion.report().rows if row.kind == "fp8")


def stand_in(monkeypatch, name, **members):
    """A module of this name in the host's place, installed or not, until the test ends; and its parents."""
    parent = None
    for end in range(1, name.count(".") + 2):
        path = ".".join(name.split(".")[:end])
        if not hasattr(sys.modules.get(path), "is_stand_in"):
            module = types.ModuleType(path)
            module.is_stand_in = True
            monkeypatch.setitem(sys.modules, path, module)
            if parent is not None:
                setattr(parent, path.rpartition(".")[2], module)
        parent = sys.modules[path]
    vars(parent).update(members)
    return parent


def absent(monkeypatch, *names):
    """As if these packages were not installed, until the test ends."""
    loaded = [n for n in sys.modules if n.partition(".")[0] in names]
    for name in {*names, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)


def import_anew(monkeypatch, name):
    """Import a module of Tigon while stand-ins are in place; it is forgotten at the test's end, and they with it."""
    package, _, last = name.rpartition(".")
    # What undoing this removes. Attributes of the package are modules that are imported when they are asked for.
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(vars(importlib.import_module(package)), last, None)
    del sys.modules[name]
    return importlib.import_module(name)
