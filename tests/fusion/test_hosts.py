"""Fused models under what people train with: checkpointing, autocast, PEFT, accelerate, Trainer, DDP, torch.compile."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from test_families import APART, CALLS, assert_close, step
from torch import nn

import tigon
from tigon.fusion.logits.compiled import CompiledLogits

transformers = pytest.importorskip("transformers")
from zoo import BASE, batch, build  # noqa: E402


def compare(model, inputs, context=contextlib.nullcontext, rtol=2e-6):
    """Plain and fused step on the same model; returns the report after the fused one."""
    with context():
        torch.manual_seed(0)
        plain, plain_grads = step(model, inputs)
        with tigon.fuse(model) as fusion:
            torch.manual_seed(0)
            fused, fused_grads = step(model, inputs)
            report = fusion.report()
    torch.testing.assert_close(fused.loss, plain.loss, rtol=rtol, atol=0)
    if rtol < 1e-4:
        assert_close(fused_grads, plain_grads)
    return report


@pytest.mark.parametrize(("family", "reentrant"), [("gemma2", True), ("qwen3_moe", False)])
def test_gradient_checkpointing(family, reentrant):
    model = build(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    ran = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: ran.append(1))
    report = compare(model, batch(family))
    assert report.calls["head"] == 1
    assert len(ran) == 4, "the layer ran again in both backward passes"


@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_autocast(family):
    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    report = compare(build(family), batch(family), autocast, rtol=1e-3)
    assert report.calls == CALLS[family]


def test_tied_embeddings():
    model = build("gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compare(model, batch("gemma"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("family", ["gemma2", "phi"])
def test_generate(family):
    model = build(family).eval()
    ids = batch(family)["input_ids"][:, :6]
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    with tigon.fuse(model) as fusion:
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), plain)
        calls = fusion.report().calls
        assert calls.pop("head", 0) == 0
        assert calls == {k: v for k, v in APART[family].items() if k != "head"}


def test_save_pretrained(tmp_path):
    from safetensors.torch import load_file

    model = build("llama")
    model.save_pretrained(tmp_path / "plain")
    with tigon.fuse(model):
        step(model, batch("llama"))
        model.save_pretrained(tmp_path / "fused")
    plain, fused = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fused"))
    assert plain.keys() == fused.keys()
    assert all(torch.equal(fused[k], v) for k, v in plain.items())
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "fused/config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused").train()
    assert torch.equal(loaded(**batch("llama")).loss, model(**batch("llama")).loss)


# --------------------------------------------------------------------------------------------------------------- PEFT


def test_what_is_merged_knows_its_fusion():
    """What adapters compute in fused models is in tests/integrations."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"])).train()
    tigon.fuse(model)  # whose Fusion nobody keeps
    merged = model.merge_and_unload()
    del model
    gc.collect()
    fusion = tigon.fuse(merged)
    merged(**batch("llama"))
    assert fusion.report().calls == CALLS["llama"]
    fusion.remove()
    assert not any("_tigon" in vars(m) for m in merged.modules())
    assert tigon.fuse(merged) is not fusion


# --------------------------------------------------------------------------------------------- quantised and placed


class QuantizedLinear(nn.Module):
    """Stands for the heads of quantisation libraries: in and out features, and a forward of its own."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = nn.Buffer(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantised_layers_run_as_they_are():
    model = build("llama")
    model.lm_head = QuantizedLinear(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.gate_proj = QuantizedLinear(layer.mlp.gate_proj)
    report = compare(model, batch("llama"))
    assert report.calls == {"norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2}
    (reason,) = [row.what for row in report.skipped_rows if row.kind == "head"]
    assert "not a plain torch.nn.Linear (quantised" in reason


def test_device_hooks_of_accelerate_are_respected():
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = build("llama"), batch("llama")
    plain = model(**inputs).loss
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu"))
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(**inputs).loss, plain, rtol=2e-6, atol=0)
        assert "head" not in fusion.report().calls
    hooks.remove_hook_from_module(model.lm_head)
    fusion = tigon.fuse(model)
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu"))  # after: our forward inside of theirs
    torch.testing.assert_close(model(**inputs).loss, plain, rtol=2e-6, atol=0)
    fusion.remove()
    assert torch.equal(model(**inputs).loss, plain)


# ------------------------------------------------------------------------------------------- accelerate and Trainer


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.randint(3, 89, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": torch.where(torch.arange(12) < i % 4, -100, ids)}


def trained(tmp_path, fused, **options):
    pytest.importorskip("accelerate")
    model = build("llama")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / str(fused)), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=3,
        logging_steps=1, report_to=[], use_cpu=True, learning_rate=1e-2, save_strategy="no", disable_tqdm=True,
        **{k: v for k, v in options.items() if k != "compute_metrics"},
    )  # fmt: skip
    fusion = tigon.fuse(model) if fused else None
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=options.get("compute_metrics")
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate(), fusion, trainer


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 2, "bf16": True}, {"label_smoothing_factor": 0.1}],
    ids=["accumulation", "smoothing"],
)
def test_trainer(tmp_path, options):
    def compute_metrics(prediction):
        logits, labels = prediction.predictions, prediction.label_ids
        return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100].mean())}

    options = {**options, "compute_metrics": compute_metrics}
    plain, plain_metrics, _, _ = trained(tmp_path, fused=False, **options)
    fused, fused_metrics, fusion, trainer = trained(tmp_path, fused=True, **options)
    tolerance = 2e-2 if "bf16" in options else 1e-4
    assert len(plain) == 3
    assert plain == pytest.approx(fused, rel=tolerance)
    assert fused_metrics["eval_loss"] == pytest.approx(plain_metrics["eval_loss"], rel=tolerance)
    assert fused_metrics["eval_accuracy"] == pytest.approx(plain_metrics["eval_accuracy"], abs=0.05)
    step = fusion.report()
    if "label_smoothing_factor" in options:
        assert "head" not in step.calls, "Trainer's smoother takes log_softmax of the logits"
    else:
        assert step.calls["head"] == 1
        assert step.logits_built_by == {"detach": 1}, "evaluation with metrics gathers logits"
    predictions = trainer.predict(Rows())
    assert predictions.predictions.shape == (8, 12, BASE["vocab_size"])


def test_trainer_without_metrics_never_builds_logits(tmp_path):
    _, _, fusion, _ = trained(tmp_path, fused=True)
    assert fusion.report().calls["head"] == 1
    assert not fusion.report().logits_built_by


# ----------------------------------------------------------------------------------------------------------- parallel


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel(process_group, options):
    """The model's own loss and one outside, of logits that DDP clones where it looks for unused parameters."""
    model, inputs = build("llama"), batch("llama")
    labels = inputs["labels"]
    own, own_grads = step(model, inputs)

    def loss_of(wrapped):
        model.zero_grad()
        logits = wrapped(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    plain = loss_of(model)
    plain.backward()
    plain_grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    fusion = tigon.fuse(model)
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    for _ in range(2):
        loss = loss_of(wrapped)
        loss.backward()
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=0)
    assert_close({n: p.grad for n, p in model.named_parameters()}, plain_grads)
    assert fusion.report().calls["head"] == 2, "the model's own loss, and this one"
    model.zero_grad()
    outputs = wrapped(**inputs)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, own.loss, rtol=2e-6, atol=0)
    assert_close({n: p.grad for n, p in model.named_parameters()}, own_grads)
    assert fusion.report().calls == CALLS["llama"]
    assert not fusion.report().logits_built_by
    assert tigon.fuse(wrapped) is fusion, "the wrapper of a fused model is fused"


@pytest.mark.parametrize("head_of_its_own", [False, True])
@pytest.mark.parametrize("first", ["fuse", "shard"])
def test_fully_sharded(process_group, first, head_of_its_own):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = process_group.device_mesh.init_device_mesh("cpu", (1,))
    model, inputs = build("llama"), batch("llama")
    plain, plain_grads = step(model, inputs)
    model.zero_grad()
    fusion = tigon.fuse(model) if first == "fuse" else None
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    if head_of_its_own:
        fsdp.fully_shard(model.lm_head, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    fusion = fusion or tigon.fuse(model)
    outputs = model(**inputs)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, plain.loss, rtol=2e-6, atol=0)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert_close(grads, plain_grads)
    assert fusion.report().calls["norm"] == 5
    assert fusion.report().calls["head"] == 1
    assert not fusion.report().logits_built_by


# ------------------------------------------------------------------------------------------------------ torch.compile


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiles_as_one_graph(fresh_dynamo):
    """Gemma 3 has all that is joined: sums and norms, head norms and rotations; and a softcap on the logits."""
    model, inputs = build("gemma3"), batch("gemma3")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    plain, plain_grads = step(model, inputs)
    fusion = tigon.fuse(model)
    graphs = []

    def backend(module, example):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(module)
        return aot_eager(module, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        model.zero_grad()
        outputs = compiled(**inputs)
        outputs.loss.backward()
    assert len(graphs) == 1, "counting must not compile again"
    torch.testing.assert_close(outputs.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, plain_grads)

    assert isinstance(outputs.logits, CompiledLogits)
    torch.testing.assert_close(outputs.logits.detach(), plain.logits.detach())
    kept = compiled(**inputs).logits
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"Read outputs\.logits before optimizer\.step"):
        kept.argmax(-1)
    with torch.no_grad():
        evaluated = compiled(**inputs)
    assert type(evaluated.logits) is torch.Tensor, "evaluation gathers logits"
    fusion.remove()
    assert type(model(**inputs).logits) is torch.Tensor


class Small(nn.Module):
    """A model without attention, whose many small kernels a C++ compiler would take a minute for."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(97, 32), nn.Linear(32, 97, bias=False)
        self.norm, self.second = (nn.RMSNorm(32, eps=1e-6) for _ in range(2))
        self.mlp = copy.deepcopy(build("llama").model.layers[0].mlp)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        total = x + self.mlp(self.norm(x))
        logits = self.head(self.second(total))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


@pytest.mark.slow
def test_compiles_with_inductor(fresh_dynamo):
    model = Small()
    ids = batch("llama")["input_ids"]
    plain = model(ids, ids)
    plain.backward()
    plain_grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    fusion = tigon.fuse(model)
    assert {row.kind for row in fusion.report().fused_rows} >= {"head", "norm", "mlp"}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True)(ids, ids)
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=0)
    assert_close({n: p.grad for n, p in model.named_parameters()}, plain_grads)


def test_a_compiled_function_of_lazy_logits(fresh_dynamo):
    model, inputs = build("llama"), batch("llama")
    entropy = torch.compile(lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(), backend="aot_eager")
    plain = model(**inputs).logits
    expected = -(plain.softmax(-1) * plain.log_softmax(-1)).sum(-1).mean()
    with tigon.fuse(model):
        torch.testing.assert_close(entropy(model(**inputs).logits), expected)


def test_per_sample_gradients():
    """torch.func differentiates the plain model."""
    model, inputs = build("llama"), batch("llama")
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs).loss

    expected = torch.func.grad(loss)(parameters)
    with tigon.fuse(model) as fusion:
        assert_close(torch.func.grad(loss)(parameters), expected)
        assert fusion.report().calls == {}
        torch.testing.assert_close(loss(parameters), model(**inputs).loss)
        assert fusion.report().calls == CALLS["llama"]


def test_a_reference_copy_for_preference_losses():
    """TRL copies the policy and calls both without labels."""
    model = build("llama")
    inputs = batch("llama")
    labels = inputs.pop("labels")
    with tigon.fuse(model):
        reference = copy.deepcopy(model).eval()
        for p in reference.parameters():
            p.requires_grad_(False)
        policy = model(**inputs).logits
        with torch.no_grad():
            assert torch.equal(reference(**inputs).logits, policy)
            assert reference(**inputs, labels=labels).loss.requires_grad is False


# ------------------------------------------------------------------------------------------- who looks on, and goes far


def test_operations_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = build("llama"), batch("llama")
    counted = []
    for fused in (False, True):
        fusion = tigon.fuse(model) if fused else None
        with FlopCounterMode(display=False) as counter:
            model(**inputs).loss.backward()
        counted.append(counter.get_total_flops())
    assert fusion.report().calls["head"] == 1
    assert not fusion.report().logits_built_by
    # The fused head leaves ignored rows out.
    assert 0.7 * counted[0] <= counted[1] <= counted[0]


@pytest.mark.parametrize("to", ["norm", "head", "projection"])
def test_a_penalty_on_the_gradient_of_the_fused_loss_raises(to):
    model, inputs = build("llama"), batch("llama")
    model.set_attn_implementation("eager")
    projection = model.model.layers[0].mlp.up_proj.weight
    parameter = {"norm": model.model.norm.weight, "head": model.lm_head.weight, "projection": projection}[to]
    x = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()

    def step():
        loss = model(inputs_embeds=x, labels=inputs["labels"]).loss
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(loss + 10 * g.square().sum(), parameter)[0]

    assert step().isfinite().all()
    with tigon.fuse(model, recompute="cheap"), pytest.raises(RuntimeError, match="differentiat"):
        step()


def test_a_penalty_on_the_gradient_of_logits_is_the_plain_one():
    """On a CPU the other fused parts run as plain operations, whose results the recipes of recompute stand for."""
    model, inputs = build("llama"), batch("llama")
    model.set_attn_implementation("eager")
    x = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()

    def step():
        (g,) = torch.autograd.grad(model(inputs_embeds=x).logits.square().mean(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [p for p in model.parameters() if p.dim() == 2][1:])

    plain = step()
    with tigon.fuse(model), tigon.use_backend("torch"):
        fused = step()
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_labels(strict):
    model, inputs = build("llama"), batch("llama")
    model.config.use_cache = False
    plain = model(**inputs)
    tigon.fuse(model)
    made = torch.export.export(model, (), inputs, strict=strict).module()(**inputs)
    assert type(made.logits) is torch.Tensor
    torch.testing.assert_close(made.loss, plain.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(made.logits, plain.logits, rtol=1e-4, atol=1e-5)


def test_a_label_beyond_the_vocabulary_is_the_error_that_it_is_without_tigon():
    model, inputs = build("llama"), batch("llama")
    labels = inputs["labels"].clone()
    labels[0, 8] = 500
    for _ in range(2):
        with pytest.raises(IndexError, match="500"):
            model(input_ids=inputs["input_ids"], labels=labels)
        tigon.fuse(model)
