"""The preference losses: every type is the formula of whole logits, to fp64, and what TRL computes."""

import functools
from collections import defaultdict
from types import SimpleNamespace

import numerics
import pytest
import torch
import torch.nn.functional as F
from flat import cpo, dpo, kto, orpo, preference_reference, simpo
from modes import NothingWaits

import tigon
from tigon.losses import ValidLengths, inputs, preference
from tigon.losses import token_loss as walk
from tigon.losses.preference import reference
from tigon.losses.preference.families import log1mexp

B, T, H, V = 3, 9, 8, 21
S = 2 * B
LOSSES = {"dpo": dpo, "orpo": orpo, "cpo": cpo, "simpo": simpo, "kto": kto}
OPTIONS = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO", "kto": "KTO"}
REFERENCES = {name: functools.partial(preference_reference, kind) for name, kind in OPTIONS.items()}
LABEL = torch.tensor([True, False, False, True, True, False])


def repeated(t, times=8):
    """Longer sequences: with 8 times there are more than the 128 rows that a part holds at least."""
    return t.repeat(1, times, *(1,) * (t.dim() - 2))


def batch(device="cpu", dtype=torch.float64, seed=0):
    """Hidden states and a head, and targets of different lengths behind prompts of different lengths."""
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((S, T, H), (V, H), (V,)))
    target = torch.randint(0, V, (S, T), generator=g)
    for row, (prompt, length) in enumerate([(2, 6), (0, 9), (3, 2), (1, 4), (4, 5), (0, 7)]):
        target[row, :prompt] = -100
        target[row, prompt + length :] = -100
    return *((t * s).to(device, dtype) for t, s in ((x, 1), (weight, 0.6), (bias, 0.5))), target.to(device)


def given(device="cpu", dtype=torch.float64):
    """Log-probabilities of a reference that has its own opinion."""
    noise = torch.randn(S, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, weight, bias, target = batch()
    logps = reference.token_logps(x @ weight.t() + bias, target).sum(1) + 2 * noise
    chosen, rejected = logps.to(device, dtype).chunk(2)
    return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def head(device="cpu", dtype=torch.float64):
    x, weight, bias, _ = batch(device, dtype, seed=7)
    return {"ref_x": x, "ref_weight": weight, "ref_bias": bias}


KINDS = [
    *(("dpo", {"loss_type": t}) for t in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")),
    *(("dpo", {"loss_type": t}) for t in ("apo_down", "discopop", "sigmoid_norm", "sft", "aot_unpaired", "aot")),
    *(("dpo", {"loss_type": t, "label_smoothing": 0.2}) for t in ("exo_pair", "robust", "aot", "aot_unpaired")),
    *(("dpo", {"f_divergence_type": d, "beta": 0.02}) for d in ("forward_kl", "js_divergence", "alpha_divergence")),
    ("dpo", {"loss_type": "ipo", "f_divergence_type": "js_divergence"}),
    ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5], "bco_delta": 0.3}),
    ("dpo", {"loss_type": ["sigmoid", "aot"], "beta": 0.5}),  # together they need the whole batch
    ("dpo", {"ld_alpha": 0.3}),
    ("dpo", {"discopop_tau": 0.5, "loss_type": "discopop"}),
    ("orpo", {"beta": 0.7}),
    ("orpo", {"completion": True}),
    *(("cpo", {"loss_type": t}) for t in ("sigmoid", "hinge", "ipo", "simpo", "alphapo")),
    ("cpo", {"label_smoothing": 0.1, "cpo_alpha": 0.0, "beta": 0.5}),
    ("cpo", {"loss_type": "simpo", "alpha": 0.25, "label_smoothing": 0.1, "simpo_gamma": 1.0}),
    ("simpo", {"sft_weight": 0.3}),
    ("simpo", {"loss_type": "hinge", "gamma_beta_ratio": 0.6}),
    ("simpo", {"label_smoothing": 0.2}),
    ("kto", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7, "kl": 0.8}),
    ("kto", {"kl": -0.4}),  # below 0, hence 0
    ("kto", {"loss_type": "apo_zero_unpaired"}),
]


def arguments(name, options, source, device="cpu", dtype=torch.float64, times=1):
    """Further arguments of the loss, and those of its reference, for sequences that are repeated."""
    options = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in options.items()}
    ours, theirs = {}, {}
    if options.pop("completion", False):
        mask = torch.rand(S, T, generator=torch.Generator().manual_seed(1)) < 0.7
        ours["completion_mask"] = theirs["completion_mask"] = repeated(mask, times).to(device)
    if name == "kto":
        ours["label"] = theirs["label"] = LABEL.to(device)
    if source == "given":
        logps = {key: times * t for key, t in given(device, dtype).items()}
        if name == "kto":
            logps = {"ref_logps": torch.cat(tuple(logps.values()))}
        ours, theirs = (a | logps if name in ("dpo", "kto") else a for a in (ours, theirs))
    elif name == "dpo" and source == "free":
        ours["reference_free"] = True
    if name in ("dpo", "kto") and source == "head":
        ours |= (of := head(device, dtype))
        ours["ref_x"] = of["ref_x"] = repeated(of["ref_x"], times)
        theirs["ref_logits"] = of["ref_x"] @ of["ref_weight"].t() + of["ref_bias"]
    return ours | options, theirs | options


def transformed(x, weight, bias, temperature=1.0, softcap=None, scale=1.0):
    z = (x @ weight.t() + bias) * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


@pytest.mark.parametrize(("chunk_bytes", "known"), [(1, True), (1, False), (None, True)])
@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_every_type_is_its_formula_of_whole_logits(name, options, chunk_bytes, known):
    x, weight, bias, target = batch()
    sources = ["given", "head", "free"] if name == "dpo" else ["given", "head"] if name == "kto" else ["none"]
    times = 8
    if "f_divergence_type" in options:  # exponentials of ratios, which must not be too large for the formula as it is
        times = 1
        sources.remove("free")
    x, target = (repeated(t, times) for t in (x, target))
    for source in sources:
        ours, theirs = arguments(name, options, source, times=times)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        lengths = ValidLengths(target) if known else [target.shape[1]] * S
        loss, _ = LOSSES[name](*leaves[:2], target, bias=leaves[2], lengths=lengths, chunk_bytes=chunk_bytes, **ours)
        exact = [t.clone().requires_grad_() for t in (x, weight, bias)]
        answer = REFERENCES[name](transformed(*exact), target, **theirs)
        torch.testing.assert_close(loss, answer, rtol=1e-10, atol=1e-12)
        got, expected = (torch.autograd.grad(3 * r, of) for r, of in ((loss, leaves), (answer, exact)))
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12)
        assert expected[0].abs().max() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_transforms_and_ignore_index(name):
    x, weight, bias, target = batch()
    ours, theirs = arguments(name, {"kl": 0.1} if name == "kto" else {}, "given")
    target = torch.where(target == -100, 5, target)  # 5 is now what does not count
    how = {"temperature": 0.7, "softcap": 3.0, "scale": 1.4}
    loss, _ = LOSSES[name](x, weight, target, bias=bias, ignore_index=5, **how, **ours)
    answer = REFERENCES[name](transformed(x, weight, bias, **how), target, ignore_index=5, **theirs)
    torch.testing.assert_close(loss, answer, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------------------------- TRL


def trainer(**attributes):
    """What the loss methods of TRL's trainers look at."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda t: t, gather=lambda t: t, parallelism_config=None
    )
    common = {
        "accelerator": accelerator, "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
        "use_weighting": False, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1,
        "precompute_ref_logps": True, "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**common, **attributes})


def shifted(x, target):
    """A batch as TRL has it, of the tokens themselves: the first is predicted by nothing, the last predicts nothing."""
    ids = torch.cat((torch.zeros_like(target[:, :1]), target.clamp(min=0)), 1)
    completion = torch.cat((torch.zeros_like(target[:, :1]), (target != -100).long()), 1)
    return torch.cat((x, torch.ones_like(x[:, :1])), 1), ids, completion


class FusedHead:
    """A model as DPO and KTO call it: what TRL's fused head returns, from whole logits."""

    def __init__(self, hidden, weight, bias):
        self.hidden, self.weight, self.bias, self.training = hidden, weight, bias, True

    def __call__(self, input_ids, labels, **_):
        hidden = self.hidden[1] if isinstance(self.hidden, tuple) and input_ids.shape[0] == 2 else self.hidden
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits = (hidden @ self.weight.t() + self.bias)[:, :-1]
        labels = labels[:, 1:]
        mask, logp = labels != -100, F.log_softmax(logits, -1)

        def where(t):
            return torch.where(mask, t, torch.zeros_like(t))

        return SimpleNamespace(
            log_probs=where(logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)),
            entropy=where(-(logp.exp() * logp).sum(-1)),
            mean_logits=where(logits.mean(-1)),
            is_top1=mask & (logits.argmax(-1) == labels),
        )


def check_against(found, loss, leaves, metrics, theirs, their_leaves, close):
    torch.testing.assert_close(loss, theirs.to(loss.dtype), **close)
    got, expected = torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, their_leaves)
    torch.testing.assert_close(got, expected, **close)
    for name, value in metrics.items():
        ours, its = found[name].double(), torch.as_tensor(value, dtype=torch.float64)
        # TRL's accuracies are in fp32.
        torch.testing.assert_close({name: ours}, {name: its}, **(close | {"atol": max(close["atol"], 1e-7)}))
    assert set(found) <= set(metrics)


# Our own additions, of which TRL knows nothing.
TRLS = [(n, o) for n, o in KINDS if "bco_delta" not in o and "completion" not in o and o.get("kl", 1) > 0]


@pytest.mark.parametrize("options", [o for n, o in TRLS if n == "dpo"], ids=str)
def test_dpo_is_trls(options):
    theirs = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    defaults = {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "ld_alpha": None, "beta": 0.1}
    its = {**defaults, "label_smoothing": 0.0, **options}
    types = its.pop("loss_type", "sigmoid")
    its["loss_types"] = [types] if isinstance(types, str) else types
    its["loss_weights"] = its.pop("loss_weights", None) or [1.0] * len(its["loss_types"])
    self = trainer(args=SimpleNamespace(discopop_tau=its.pop("discopop_tau", 0.05)), **its)
    # TRL's clamp of the α-divergence knows no fp64, its exo_pair takes a logarithm in fp32.
    exact = "alpha" not in its["f_divergence_type"] and types != "exo_pair"
    dtype = torch.float32 if "alpha" in its["f_divergence_type"] else torch.float64
    x, weight, bias, target = batch(dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss, found = dpo(*leaves[:2], target, bias=leaves[2], **given(dtype=dtype), **options)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    hidden, ids, completion = shifted(whole[0], target)
    inputs = {"input_ids": ids, "completion_mask": completion, "attention_mask": torch.ones_like(ids)}
    model = FusedHead(hidden, *whole[1:])
    answer = theirs._compute_loss(self, model, {**inputs, **given(dtype=dtype)}, False)
    metrics = {name: values[0] for name, values in self._metrics["train"].items() if name in found}
    close = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 2e-5, "atol": 2e-5}
    check_against(found, loss, leaves, metrics, answer, whole, close)


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, o in TRLS if n in ("orpo", "cpo")], ids=str)
def test_orpo_and_cpo_are_trls(name, options):
    module = pytest.importorskip(f"trl.experimental.{name}.{name}_trainer")
    theirs = getattr(module, f"{name.upper()}Trainer")
    its = {"label_smoothing": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0, "beta": 0.1, **options}
    its.setdefault("loss_type", "sigmoid")
    if its["loss_type"] == "alphapo":  # what its configuration does
        its |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    self = trainer(**its)
    for method in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(theirs, method):
            setattr(self, method, functools.partial(getattr(theirs, method), self))
    self.concatenated_inputs, self.get_batch_logps = theirs.concatenated_inputs, theirs.get_batch_logps
    x, weight, bias, target = batch()
    # ORPO's NLL is over prompt and completion, its odds are of the completion: here every token counts for the first.
    tokens = target.clamp(min=0) if name == "orpo" else target
    mask = {"completion_mask": target != -100} if name == "orpo" else {}
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss, found = LOSSES[name](*leaves[:2], tokens, bias=leaves[2], **mask, **options)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    hidden, ids, completion = shifted(whole[0], target)
    inputs = {}
    for half, side in enumerate(("chosen", "rejected")):
        here = slice(half * B, (half + 1) * B)
        inputs[f"{side}_input_ids"], inputs[f"{side}_attention_mask"] = ids[here], torch.ones_like(ids[here])
        inputs[f"{side}_labels"] = torch.where(completion[here] == 1, ids[here], -100)

    def model(*_, **__):
        return SimpleNamespace(logits=hidden @ whole[1].t() + whole[2])

    answer, metrics = theirs.get_batch_loss_metrics(self, model, inputs)
    # TRL averages logits over padding and prompt as well, and leaves an NLL of weight 0 out.
    skipped = {"logits/chosen", "logits/rejected"} | ({"nll_loss"} if its["cpo_alpha"] == 0 else set())
    metrics, found = ({k: v for k, v in m.items() if k not in skipped} for m in (metrics, found))
    check_against(found, loss, leaves, metrics, answer, whole, {"rtol": 2e-5, "atol": 2e-5})  # its odds are in fp32


@pytest.mark.parametrize("options", [o for n, o in TRLS if n == "kto"], ids=str)
def test_kto_is_trls(options):
    theirs = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    options = {k: v for k, v in options.items() if k != "kl"}
    its = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **options}
    x, weight, bias, target = batch()
    kl_x, _, _, kl_target = (t[:2] if t.dim() > 1 else t for t in batch(seed=5))
    ref_kl_logps = torch.tensor([-70.0, -65.0], dtype=torch.float64)
    ref_logps = torch.cat(tuple(given().values()))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    has_kl = its["loss_type"] == "kto"
    mismatched = {"kl_x": kl_x, "kl_target": kl_target, "ref_kl_logps": ref_kl_logps} if has_kl else {}
    loss, found = kto(*leaves[:2], target, LABEL, bias=leaves[2], ref_logps=ref_logps, **mismatched, **options)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    hidden, ids, completion = shifted(whole[0], target)
    kl_hidden, kl_ids, kl_completion = shifted(kl_x, kl_target)
    inputs = {
        "input_ids": ids, "completion_mask": completion, "attention_mask": torch.ones_like(ids), "label": LABEL,
        "ref_logps": ref_logps, "ref_KL_logps": ref_kl_logps, "KL_input_ids": kl_ids,
        "KL_attention_mask": torch.ones_like(kl_ids), "KL_completion_mask": kl_completion,
    }  # fmt: skip
    self = trainer(calculate_KL=has_kl, **its)
    self._compute_kl_logps = functools.partial(theirs._compute_kl_logps, self)
    answer = theirs._compute_loss(self, FusedHead((hidden, kl_hidden), *whole[1:]), inputs, False)
    metrics = {name: values[0] for name, values in self._metrics["train"].items() if name in found}
    if has_kl:
        assert found["kl"] > 1  # or the test would not see it
    check_against(found, loss, leaves, metrics, answer, whole, {"rtol": 1e-9, "atol": 1e-9})


# ------------------------------------------------------------------------------------------ where the KL term is from


def test_the_kl_term_from_anywhere_is_the_same(monkeypatch):
    x, weight, bias, target = batch()
    kl_x, _, _, kl_target = batch(seed=5)
    of = head()
    ref_kl_x = batch(seed=8)[0]
    logps = reference.token_logps(kl_x @ weight.t() + bias, kl_target).sum(1)
    ref_logps = reference.token_logps(ref_kl_x @ of["ref_weight"].t() + of["ref_bias"], kl_target).sum(1) - 10
    kl = (logps - ref_logps).mean()
    assert kl > 0
    call = functools.partial(kto, x, weight, target, LABEL, bias=bias)
    loss, found = call(kl=kl, **of)
    torch.testing.assert_close(found["kl"], kl)
    for how in (
        {"kl": kl.item()},
        {"kl_logps": logps, "ref_kl_logps": ref_logps},
        {"kl_x": kl_x, "kl_target": kl_target, "ref_kl_logps": ref_logps},
        {"kl_x": kl_x, "kl_target": kl_target, "ref_kl_logps": ref_logps, "kl_lengths": ValidLengths(kl_target)},
    ):
        torch.testing.assert_close(call(**how, **of)[0], loss)
    monkeypatch.setattr(walk, "_evaluate_with_slopes", None)  # the KL term is asked for no gradient
    weight.requires_grad_()
    mismatched = tigon.losses.Mismatched(kl_x, kl_target, ref_logps)
    found = preference._estimate_kl(
        mismatched, tigon.Head(weight, bias), tigon.losses.KTO(), tigon.losses.ChunkOptions()
    )
    torch.testing.assert_close(found, kl)
    monkeypatch.undo()
    by_head = call(kl_x=kl_x, kl_target=kl_target, ref_kl_x=ref_kl_x, **of)[1]["kl"]
    torch.testing.assert_close(by_head, (kl - 10).clamp(min=0))
    assert by_head >= 0


# --------------------------------------------------------------------------------------------------------- numerics


FEW = [
    ("dpo", {"loss_type": ["sigmoid", "sft"]}),
    ("dpo", {"loss_type": "aot"}),
    ("orpo", {}),
    ("cpo", {}),
    ("kto", {"kl": 0.3}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "options"), FEW, ids=str)
def test_as_right_as_eager(name, options, dtype, backend, device):
    target = batch(device)[3].repeat(1, 3)
    source = "given" if name in ("dpo", "kto") else "none"

    def ours(x, weight, bias):
        extra, _ = arguments(name, options, source, device, torch.float32)
        return LOSSES[name](x, weight, target, bias=bias, lengths=[3 * T] * S, chunk_bytes=1, **extra)[0]

    def theirs(x, weight, bias):
        _, extra = arguments(name, options, source, device, torch.float32)
        return REFERENCES[name](F.linear(x, weight, bias), target, **extra)

    def draw(generator):
        shapes = (S, 3 * T, H), (V, H), (V,)
        return [(torch.randn(s, generator=generator) * 0.6).to(device, dtype) for s in shapes]

    numerics.check(ours, theirs, draw, draws=2 if backend == "triton" and device.type == "cpu" else 4)


def test_fp16_gradients_do_not_underflow(device):
    x, weight, _, target = batch(device)
    extra, _ = arguments(
        "dpo", {"beta": 0.01, "loss_type": ["sigmoid", "sft"], "loss_weights": [1, 1e-3]}, "given", device
    )
    x, target = repeated(x), repeated(target)
    half = [t.half().requires_grad_() for t in (x, weight)]
    grads = torch.autograd.grad(1024 * dpo(*half, target, **extra)[0], half)
    exact = [t.detach().double().requires_grad_() for t in half]
    expected = torch.autograd.grad(1024 * dpo(*exact, target, **extra)[0], exact)
    for g, e in zip(grads, expected, strict=True):
        assert (g.double() - e).norm() < 3e-3 * e.norm()


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_fp16_gradients_of_what_is_learned_already(name, device):
    """Pairs that are 8 / β apart have slopes of 3e-4 β, which times a probability is less than fp16 holds."""
    x, target = torch.randn(S, 50, H, device=device), torch.randint(0, 2000, (S, 50), device=device)
    weight = torch.randn(2000, H, device=device) / 4
    half = [t.half().requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in half]
    logps = reference.token_logps(F.linear(*exact), target).sum(1).detach()
    chosen = torch.arange(S, device=device) < S // 2
    logps = torch.where(chosen, logps - 40, logps + 40)
    grads = []
    for leaves in (half, exact):
        given = logps.to(torch.promote_types(leaves[0].dtype, torch.float32))
        if name == "dpo":
            loss, _ = dpo(*leaves, target, ref_chosen_logps=given[: S // 2], ref_rejected_logps=given[S // 2 :])
        else:
            loss, _ = kto(*leaves, target, chosen, kl=0.0, ref_logps=given, beta=0.2)
        grads.append(torch.autograd.grad(2**15 * loss, leaves))
    for g, e in zip(*grads, strict=True):
        assert (g.double() - e).norm() < 3e-3 * e.norm()


def test_log1mexp_holds_on_to_both_ends():
    x = torch.tensor([-1e-30, -1e-7, -1e-3, -0.6931472, -0.7, -12.0, -80.0, -1e4], requires_grad=True)
    y = log1mexp(x)
    wide = x.detach().double().clamp(max=-(2**-24))
    exact = torch.where(wide < -1, torch.log1p(-wide.exp()), torch.log(-torch.expm1(wide)))
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-38)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.isfinite().all()
    torch.testing.assert_close(slope[2:6], -1 / torch.expm1(-x.detach()[2:6]), rtol=1e-5, atol=0)


def test_a_policy_that_is_certain_and_one_that_is_far_off():
    """Logits of ±200: log-probabilities of 0 and of some thousands, where naive forms overflow."""
    x, weight, _, target = batch(dtype=torch.float32)
    weight = torch.eye(V)
    for sign in (1, -1):
        x = sign * 200 * F.one_hot(target.clamp(min=0), V).float()
        x[B:] *= -1
        for name, options in KINDS:
            if options.get("f_divergence_type") == "forward_kl" or options.get("alpha"):
                continue  # exponentials of the ratio are what they are
            if options.get("loss_type") == "discopop" and sign < 0:
                continue  # as is its exp(−margin), where the margin is a temperature of τ below 0
            ours, _ = arguments(name, options, "given", dtype=torch.float32)
            x.requires_grad_()
            loss, found = LOSSES[name](x, weight, target, **ours)
            (dx,) = torch.autograd.grad(loss, x)
            assert loss.isfinite(), (name, options)
            assert dx.isfinite().all(), (name, options)
            assert all(v.isfinite() for v in found.values()), (name, options, found)


def test_discopop_far_below_zero():
    x, weight, bias, target = batch(dtype=torch.float32)
    of = {"ref_chosen_logps": torch.zeros(B), "ref_rejected_logps": torch.full((B,), -3000.0)}
    x.requires_grad_()
    loss, _ = dpo(x, weight, target, bias=bias, loss_type="discopop", **of)
    assert loss > 250  # −log σ alone
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


# ----------------------------------------------------------------------------------------------------------- corners


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "options"), FEW, ids=str)
def test_sequences_without_a_token_that_counts(name, options, known, device):
    x, weight, bias, target = batch(device)
    target[1] = target[B] = -100
    lengths = None if known else [T] * S
    ours, theirs = arguments(name, options, "given", device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss, found = LOSSES[name](*leaves[:2], target, bias=leaves[2], lengths=lengths, **ours)
    answer = REFERENCES[name](transformed(*leaves), target, **theirs)
    torch.testing.assert_close(loss, answer, rtol=1e-9, atol=1e-12)
    grads, expected = torch.autograd.grad(loss, leaves), torch.autograd.grad(answer, leaves)
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-8, atol=1e-12)
    assert grads[0][1].abs().max() == 0
    assert grads[0][B].abs().max() == 0
    assert all(v.isfinite() for v in found.values())


@pytest.mark.parametrize(("name", "options"), FEW, ids=str)
def test_a_batch_without_sequences(name, options, device):
    x = torch.randn(0, T, H, device=device, requires_grad=True)
    weight = torch.randn(V, H, device=device, requires_grad=True)
    none = torch.zeros(0, device=device)
    extra = {
        "dpo": {"ref_chosen_logps": none, "ref_rejected_logps": none},
        "kto": {"label": none.bool(), "ref_logps": none, "kl": 0.0},
    }.get(name, {})
    loss, _ = LOSSES[name](x, weight, torch.zeros(0, T, dtype=torch.long, device=device), **{**extra, **options})
    loss.backward()
    assert loss == 0
    assert x.grad.shape == x.shape
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {}),
        ("orpo", {}),
        ("cpo", {"cpo_alpha": 0.0}),
        ("kto", {"kl": 0.3}),
        ("kto", {"kl": 0.3, "label": ~LABEL}),
    ],
    ids=str,
)
def test_what_is_broken_stays_visible_and_where_it_is(name, options, broken, device):
    x, weight, bias, target = batch(device)
    x[1, 4, 0] = broken
    x.requires_grad_()
    ours, _ = arguments(name, options, "given", device)
    loss, found = LOSSES[name](x, weight, target, bias=bias, **ours)
    assert loss.isnan()
    its, other = ("rejected", "chosen") if name == "kto" and "label" not in options else ("chosen", "rejected")
    assert found[f"logps/{its}"].isnan()
    assert found[f"logps/{other}"].isfinite()
    (dx,) = torch.autograd.grad(loss, x)
    assert dx[1, 4].isnan().all()
    others = [0, 2, 3, 5] if name != "kto" else [0, 2, 3, 4, 5]
    assert dx[others].isfinite().all()
    assert dx[0].abs().max() > 0


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_nothing_waits_for_the_device(name, options, known, monkeypatch):
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)  # on a CPU it looks at the targets
    x, weight, bias, target = batch()
    ours, _ = arguments(name, options, "given")
    lengths = (target != -100).sum(1).tolist() if known else [T] * S
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    if name == "kto" and "kl" in ours:
        ours |= {"kl": None, "kl_x": x.detach(), "kl_target": target, "ref_kl_logps": ours["ref_logps"]}
        monkeypatch.setattr(walk, "_count_lengths", lambda *_: lengths)
    with NothingWaits():
        LOSSES[name](*leaves[:2], target, bias=leaves[2], lengths=lengths, chunk_bytes=1, **ours)


@pytest.mark.parametrize(("name", "options"), FEW, ids=str)
def test_compiles_whole(name, options, device):
    torch._dynamo.reset()
    x, weight, bias, target = batch(device)
    ours, _ = arguments(name, options, "given", device)

    def call(x, weight, bias, target):
        return LOSSES[name](x, weight, target, bias=bias, **ours)

    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss, found = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)(*leaves, target)
    expected, metrics = call(*leaves, target)
    torch.testing.assert_close((loss, found), (expected, metrics))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


GIVEN = given()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dpo", {"loss_type": "aot_pair"}, r"dpo: loss_type must be one of 'sigmoid', .*, got 'aot_pair'"),
        ("dpo", {"loss_type": []}, r"dpo: loss_type must be one of"),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, r"dpo: loss_weights must hold one weight"),
        ("dpo", {"beta": 0.0}, r"dpo: beta must be positive, got 0.0"),
        ("dpo", {"loss_type": "robust", "label_smoothing": 0.5}, r"label_smoothing must be below 0.5 for 'robust'"),
        ("dpo", {"loss_type": "exo_pair"}, r"label_smoothing must be above 0 for 'exo_pair'"),
        ("dpo", {"label_smoothing": -0.1}, r"dpo: label_smoothing must lie in \[0, 1\), got -0.1"),
        ("dpo", {"f_divergence_type": "kl"}, r"dpo: f_divergence_type must be one of"),
        ("dpo", {"loss_type": "aot", "f_divergence_type": "forward_kl"}, r"must be 'reverse_kl' for \['aot'\], whose"),
        ("dpo", {"ld_alpha": 1.5}, r"dpo: ld_alpha must lie in \[0, 1\], got 1.5"),
        ("dpo", {"bco_delta": 0.1}, r"dpo: bco_delta must be left out without 'bco_pair'"),
        ("dpo", {"reference_free": True}, r"dpo: ref must be .*, got one with reference_free=True"),
        ("dpo", {"ref_chosen_logps": torch.zeros(S)}, r"dpo: ref's chosen must have shape \(3,\), got \(6,\)"),
        ("dpo", {"x": torch.zeros(3, T, H)}, r"dpo: x must be \(2B, T, H\)"),
        ("dpo", {"temperature": 0.0}, r"dpo: temperature must be positive"),
        ("orpo", {"beta": -1.0}, r"orpo: beta must be positive"),
        ("orpo", {"completion_mask": torch.ones(2, 2)}, r"orpo: completion_mask must have target's shape"),
        ("cpo", {"loss_type": "dpo"}, r"cpo: loss_type must be one of"),
        ("simpo", {"loss_type": "ipo"}, r"simpo: loss_type must be one of 'sigmoid', 'hinge', got 'ipo'"),
        ("simpo", {"softcap": -1.0}, r"simpo: softcap must be positive"),
        ("kto", {"loss_type": "bco"}, r"kto: loss_type must be one of"),
        ("kto", {"label": torch.ones(S)}, r"kto: unpaired.label must be \(6,\) bool, got \(6,\) torch.float32"),
        ("kto", {"kl": None}, r"kto: unpaired.kl must be given for loss_type 'kto', got none"),
        ("kto", {"loss_type": "apo_zero_unpaired"}, r"unpaired.kl must be left out for loss_type 'apo_.*', got float"),
        ("kto", {"kl_logps": torch.zeros(2), "ref_kl_logps": torch.zeros(3)}, r"kto: unpaired.kl's two must have one"),
        ("kto", {"ref_logps": torch.zeros(2)}, r"kto: unpaired.ref must have shape \(6,\), got \(2,\)"),
        ("kto", {"ref_logps": None}, r"kto: unpaired.ref must be log-probabilities or a Hidden, got NoneType"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name, options, sentence):
    x, weight, _, target = batch()
    extra, _ = arguments(name, {"kl": 0.1} if name == "kto" else {}, "given")
    call = {"x": x, "weight": weight, "target": target, **extra, **options}
    with pytest.raises(ValueError, match=sentence):
        LOSSES[name](**call)


# ------------------------------------------------------------------------------------------------- modules and texts
