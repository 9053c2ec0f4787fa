"""A fused model over its life: called by threads, copied, pickled, given another head, and let go."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.fusion.logits import labels as labels_module
from tigon.fusion.logits.lazy import LazyLogits

transformers = pytest.importorskip("transformers")
from zoo import batch, build  # noqa: E402

# ------------------------------------------------------------------------------------------------------------- threads


def test_labels_belong_to_the_call_they_were_given_to():
    """One thread is inside a layer, with labels; another calls without, begins later and ends later."""
    model, inputs = build("llama"), batch("llama")
    without = {k: v for k, v in inputs.items() if k != "labels"}
    fusion = tigon.fuse(model)
    inside = {name: threading.Event() for name in "ab"}
    go_on = {name: threading.Event() for name in "ab"}
    names = threading.local()

    def wait(*_):
        name = getattr(names, "name", None)
        if name is not None:
            inside[name].set()
            assert go_on[name].wait(60)

    model.model.layers[0].register_forward_pre_hook(wait)
    outputs = {}

    def call(name, given):
        names.name = name
        outputs[name] = model(**given)

    threads = {name: threading.Thread(target=call, args=(name, g)) for name, g in (("a", inputs), ("b", without))}
    for name in "ab":
        threads[name].start()
        assert inside[name].wait(60)
    for name in "ab":
        go_on[name].set()
        threads[name].join()
    assert type(outputs["a"].logits) is LazyLogits
    assert type(outputs["b"].logits) is torch.Tensor
    assert type(model(**without).logits) is torch.Tensor, "and nothing of it stays behind"
    for _ in range(2):
        model(**inputs)
        assert fusion.report().calls["head"] == 1


def test_calls_may_end_in_any_order():
    """As those that generators run."""
    ledger = tigon.fuse(build("llama"))._ledger
    a, b = ledger.enter(lazy=True), ledger.enter(lazy=False)
    assert not ledger.lazy
    ledger.leave(a)
    assert not ledger.lazy
    ledger.leave(b)
    assert not ledger.lazy
    assert ledger._calls.innermost is None


def test_threads_train_one_model_as_they_would_alone(monkeypatch):
    """As the replicas of torch.nn.DataParallel do, with labels counted as on a GPU."""
    monkeypatch.setattr(labels_module, "is_far", lambda labels: True)
    model = build("llama")
    batches = [{k: v[:, : 8 + i] for k, v in batch("llama").items()} for i in range(4)]
    for i, inputs in enumerate(batches):
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, : 2 * i] = -100
    expected = [model(**inputs).loss.detach() for inputs in batches]
    tigon.fuse(model)
    losses = [[] for _ in batches]

    def run(i):
        for _ in range(5):
            loss = model(**batches[i]).loss
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            losses[i].append(loss.detach())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, plain in zip(losses, expected, strict=True):
        assert len(found) == 5
        for loss in found:
            torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)


def test_a_loss_on_the_prompt_too_is_no_nan_on_a_gpu(monkeypatch):
    monkeypatch.setattr(labels_module, "is_far", lambda labels: True)
    model, inputs = build("llama"), batch("llama")

    def on_every_token(logits, labels, vocab_size, **_):
        everything = torch.where(labels == -100, inputs["input_ids"], labels)
        return F.cross_entropy(logits.view(-1, vocab_size), everything.view(-1))

    model.loss_function = on_every_token
    plain = model(**inputs).loss
    fusion = tigon.fuse(model)
    torch.testing.assert_close(model(**inputs).loss, plain, rtol=1e-5, atol=0)
    assert fusion.report().calls["head"] == 1


# ------------------------------------------------------------------------------------------------------------- let go


@pytest.mark.parametrize("keep_fusion", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_fused_model_is_freed_when_the_last_name_of_it_goes(family, keep_fusion):
    model = build(family)
    gc.collect()
    gc.disable()
    try:
        fusion = tigon.fuse(model)
        model(**batch(family)).loss.backward()
        seen = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        report = fusion.report()
        gone = weakref.ref(fusion)
        if not keep_fusion:
            del fusion
        model.zero_grad()
        del model
        assert not any(r() is not None for r in seen)
        if keep_fusion:
            assert fusion.report().calls == report.calls
            fusion.remove()
            with pytest.raises(ReferenceError, match="does not keep its model"):
                _ = fusion.model
            del fusion
        assert gone() is None
    finally:
        gc.enable()


def test_the_model_keeps_its_fusion():
    model = build("llama")
    tigon.fuse(model)
    gc.collect()
    assert tigon.fuse(model).report().fused_rows
    assert not any("_tigon" in vars(m) for m in (tigon.fuse(model).remove(), model)[1].modules())


# ----------------------------------------------------------------------------------------------------- copied, pickled


def by_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_dill(model):
    dill = pytest.importorskip("dill")
    return dill.loads(dill.dumps(model))


def by_cloudpickle(model):
    cloudpickle = pytest.importorskip("cloudpickle")
    return pickle.loads(cloudpickle.dumps(model))


def by_pickle(model, protocol=None):
    return pickle.loads(pickle.dumps(model, protocol))


WAYS = {
    "pickle": by_pickle, "pickle, protocol 2": lambda m: by_pickle(m, 2), "torch.save": by_torch, "dill": by_dill,
    "cloudpickle": by_cloudpickle, "copy.copy": copy.copy,
}  # fmt: skip


def of_family(family):
    torch.manual_seed(0)
    small = {"d_model": 16, "vocab_size": 60}
    if family == "t5":
        config = transformers.T5Config(**small, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        return build(family).eval(), batch(family)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    return model.eval(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_pickled_model_is_plain_and_works(family, way):
    model, inputs = of_family(family)
    plain = model(**inputs).loss
    fusion = tigon.fuse(model)
    made = WAYS[way](model)
    assert not {"_tigon", "_tigon_fusion", "forward"} & vars(made).keys()
    if way != "copy.copy":  # which shares its modules with the fused one
        assert not any("_tigon" in vars(m) or "forward" in vars(m) for m in made.modules())
        assert torch.equal(made(**inputs).loss, plain)
        again = tigon.fuse(made)
        assert again.report().fused_rows == fusion.report().fused_rows
    torch.testing.assert_close(made(**inputs).loss, plain, rtol=1e-5, atol=0)
    torch.testing.assert_close(model(**inputs).loss, plain, rtol=1e-5, atol=0)


def test_what_is_made_of_a_fused_model_has_a_fingerprint():
    """`datasets` finds what it has computed before by the bytes that dill makes of a function and its model."""
    fingerprint = pytest.importorskip("datasets.fingerprint").Hasher.hash
    model = build("llama")
    plain = model.state_dict()
    tigon.fuse(model)

    def of(row):
        return model(row)

    first = fingerprint(of)
    assert fingerprint(of) == first
    model(**batch("llama"))
    assert fingerprint(of) == first
    with torch.no_grad():
        plain["lm_head.weight"].add_(1.0)
    assert fingerprint(of) != first


def test_datasets_maps_with_a_fused_model_over_processes():
    datasets = pytest.importorskip("datasets")
    model = build("llama").eval()
    tigon.fuse(model)

    def count(row):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["ids"]])).logits
        return {"width": logits.shape[-1]}

    rows = datasets.Dataset.from_dict({"ids": [[3, 4, 5], [6, 7, 8]]})
    assert rows.map(count, num_proc=2)["width"][:] == [97, 97]


@pytest.mark.parametrize("wrap", ["hands on what it lacks", "sequential"])
def test_a_wrapper_of_a_fused_model_is_copied_whole(wrap):
    class Wrapper(nn.Module):
        """As PEFT's and FSDP's."""

        def __init__(self, model):
            super().__init__()
            self.inner, self.more = model, nn.Linear(2, 2)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    model = build("llama")
    wrapper = Wrapper(model) if wrap != "sequential" else nn.Sequential(model, nn.Linear(2, 2))
    tigon.fuse(wrapper)
    for made in (copy.deepcopy(wrapper), by_pickle(wrapper) if wrap == "sequential" else copy.copy(wrapper)):
        assert type(made) is type(wrapper)
        assert made.state_dict().keys() == wrapper.state_dict().keys()


def test_a_shallow_copy_computes_with_its_own_head():
    model, inputs = build("llama"), batch("llama")
    tigon.fuse(model)
    other = copy.copy(model)
    other._modules = dict(model._modules)
    torch.manual_seed(7)
    other.lm_head = nn.Linear(32, 97, bias=False)
    hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    assert torch.equal(other(**inputs).logits, other.lm_head(hidden))
    assert not torch.equal(other(**inputs).loss, model(**inputs).loss)
    fusion = tigon.fuse(other, parts=tigon.PARTS - {"norm"})
    assert type(other(**inputs).logits) is LazyLogits
    assert fusion.report().calls["head"] == 1


def test_a_deep_copy_of_a_wrapped_model_is_fused_too():
    model, inputs = build("llama"), batch("llama")
    tigon.fuse(model)
    twin = copy.deepcopy(nn.Sequential(model))[0]
    assert tigon.fuse(twin) is not tigon.fuse(model)
    twin(**inputs)
    assert tigon.fuse(twin).report().calls["head"] == 1
    assert not tigon.fuse(model).report().steps
    tigon.fuse(twin).remove()
    assert not any("_tigon" in vars(m) for m in twin.modules())
    assert type(model(**inputs).logits) is LazyLogits


# --------------------------------------------------------------------------------------------------- given another head


def resized(model):
    model.resize_token_embeddings(101)


def exchanged(model):
    model.set_output_embeddings(nn.Linear(32, 101))


@pytest.mark.parametrize("change", [resized, exchanged])
@pytest.mark.parametrize("asked", ["report", "fuse", "nothing"])
def test_a_head_that_replaces_the_fused_one_is_fused(change, asked):
    model, inputs = build("llama"), batch("llama")
    model.config.vocab_size = 97
    fusion = tigon.fuse(model)
    old = model.lm_head
    model(**inputs)
    change(model)
    assert model.lm_head is not old
    if asked == "report":
        assert [row.count for row in fusion.report().fused_rows if row.kind == "head"] == [1]
    elif asked == "fuse":
        assert tigon.fuse(model) is fusion
    model.config.vocab_size = 101
    outputs = model(**inputs)
    assert type(outputs.logits) is LazyLogits
    assert fusion.report().calls["head"] == 1
    assert "_tigon" not in vars(old)
    plain = F.linear(outputs.logits.recipe.hidden, model.lm_head.weight, model.lm_head.bias)
    assert torch.equal(outputs.logits.detach(), plain.detach())
    fusion.remove()
    assert not any("_tigon" in vars(m) for m in model.modules())
    torch.testing.assert_close(model(**inputs).loss, outputs.loss, rtol=1e-5, atol=0)


def test_a_head_that_cannot_be_fused_and_replaces_one_that_was_is_in_the_report():
    class Scaled(nn.Linear):
        pass

    model, inputs = build("llama"), batch("llama")
    fusion = tigon.fuse(model)
    model.lm_head = Scaled(32, 97)
    assert type(model(**inputs).logits) is torch.Tensor
    assert not [row for row in fusion.report().fused_rows if row.kind == "head"]
    (row,) = [row for row in fusion.report().skipped_rows if row.kind == "head"]
    assert row.name == "Scaled"
    assert "not a plain torch.nn.Linear" in row.what
    model.lm_head = nn.Linear(32, 97)
    assert type(model(**inputs).logits) is LazyLogits
