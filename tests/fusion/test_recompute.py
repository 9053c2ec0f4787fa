"""What is computed again in the backward pass: the same bits, fewer tensors kept, nobody else's plans upset."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tigon

pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from zoo import batch, build

from tigon.fusion.memory.recompute import HELD, LEVELS, Pass, Recompute
from tigon.ops.linear import dense_mlp

# Tensors that are not kept, of the two layers that a model has: two results of norms a layer, and q where the rotation
# follows a norm (these models repeat k for the heads, which makes another tensor of it).
NOT_KEPT = {"llama": 4, "gemma3": 6, "qwen3_moe": 6, "cohere": 2, "phi3": 4, "gpt2": 6, "gpt_oss": 4}


@pytest.fixture(autouse=True)
def deterministic(device):
    """Attention's gradient adds in any order on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(family, level, device, dtype=None, backward=None, checkpointing=None):
    """Loss, gradients and report of one step at a level. dtype: of autocast."""
    model = build(family).to(device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    fusion = tigon.fuse(model, recompute=level)
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        loss = model(**inputs).loss
    report = fusion.report()
    (backward or torch.Tensor.backward)(loss)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, report


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("family", [*NOT_KEPT, "deepseek_v3"])
def test_the_same_bits_as_from_what_was_kept(family, dtype, device):
    loss, kept, nothing = run(family, "none", device, dtype)
    again_loss, again, report = run(family, "cheap", device, dtype)
    assert torch.equal(loss, again_loss)
    assert_same_bits(again, kept)
    assert nothing.tensors_not_kept == nothing.bytes_not_kept == 0
    if dtype is None and family in NOT_KEPT and device.type == "cpu":
        assert report.tensors_not_kept == NOT_KEPT[family]
    assert (report.recompute, nothing.recompute) == ("cheap", "none")


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_gate_and_up_too(family, device):
    plain = run(family, "none", device)
    loss, again, _ = run(family, "mlp", device)
    assert torch.equal(loss, plain[0])
    for name, g in plain[1].items():
        assert (again[name] - g).norm() <= 1e-5 * g.norm(), name


@pytest.mark.parametrize(("level", "reentrant"), [("cheap", True), ("mlp", False)])
def test_steps_aside_for_checkpoints(level, reentrant, device):
    loss, kept, _ = run("qwen3", "none", device)
    again_loss, again, report = run("qwen3", level, device, checkpointing=reentrant)
    assert torch.equal(loss, again_loss)
    assert_same_bits(again, kept)
    assert report.tensors_not_kept == 0


class Products(TorchDispatchMode):
    """Counts matrix products. (FlopCounterMode hooks all modules, and layers with hooks are called as they are.)"""

    PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in self.PRODUCTS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["product", "cheap"])
def test_a_checkpoint_multiplies_no_more_than_in_the_plain_model(level, device):
    """It stops in the last layer's way before the product whose input it wanted."""
    counted = {}
    for fused in (False, True):
        model = build("llama").to(device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inputs = {k: v.to(device) for k, v in batch("llama").items()}
        if fused:
            tigon.fuse(model, recompute=level, parts=tigon.PARTS - {"head"})
        backend = tigon.use_backend("triton") if fused else contextlib.nullcontext()
        with backend, Products() as products:
            model(**inputs).loss.backward()
        counted[fused] = products.count
    assert counted[True] == counted[False]


def test_a_checkpoint_computes_no_product_of_gate_and_up_again(device, monkeypatch):
    """It has gate and up, which is all that was saved, and makes the product while it makes their gradients."""
    made = []
    product = dense_mlp._gated_fwd
    monkeypatch.setattr(dense_mlp, "_gated_fwd", lambda *arguments: made.append(1) or product(*arguments))
    model = build("llama").to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tigon.fuse(model)
    with tigon.use_backend("triton"):
        loss = model(**{k: v.to(device) for k, v in batch("llama").items()}).loss
        assert len(made) == model.config.num_hidden_layers
        loss.backward()
    assert len(made) == model.config.num_hidden_layers


def test_the_backward_pass_lets_go_of_checkpoints(device):
    """Layer by layer, as torch itself does, and not when the loss is dropped in the end."""

    def frames():
        gc.collect()
        return sum(type(o) is torch.utils.checkpoint._CheckpointFrame for o in gc.get_objects())

    model = build("llama").to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tigon.fuse(model)
    before = frames()
    with tigon.use_backend("triton"):
        loss = model(**{k: v.to(device) for k, v in batch("llama").items()}).loss
        assert frames() == before + model.config.num_hidden_layers
        loss.backward()
    assert frames() == before


@pytest.mark.parametrize(("checkpointing", "early_stop"), [(None, True), (False, True), (False, False)])
def test_a_step_twice_and_with_its_graph_kept(checkpointing, early_stop, device):
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    with tigon.use_backend("triton"), torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        _, once, _ = run("qwen3", "cheap", device, checkpointing=checkpointing)
        _, both, _ = run("qwen3", "cheap", device, checkpointing=checkpointing, backward=twice)
        _, plain, _ = run("qwen3", "none", device)
    assert_same_bits(once, plain)
    assert_same_bits(both, {n: g + g for n, g in once.items()})


class Mixed(nn.Module):
    """A norm whose result three layers save, one of them through a view and one transposed."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.one, self.two, self.three = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, labels=None):
        y = self.norm(x)
        return self.one(y).sum() + self.two(y.view(-1, 16)).square().sum() + (self.three(y.transpose(0, 1)) * 2).sum()


def fused_mixed(device, **options):
    torch.manual_seed(0)
    model = Mixed().to(device)
    return model, tigon.fuse(model, **options), torch.randn(3, 5, 16, device=device, requires_grad=True)


def test_what_is_left_out_is_freed(device, monkeypatch):
    """After the forward pass nothing holds the result of the norm, where all who saved it have a recipe."""
    results = []
    note = Recompute.note

    def seen(self, result, *args, **kwargs):
        results.append(weakref.ref(result))
        return note(self, result, *args, **kwargs)

    monkeypatch.setattr(Recompute, "note", seen)
    for level, alive in (("product", True), ("cheap", False)):
        model, _, x = fused_mixed(device, recompute=level)
        results.clear()
        loss = model(x)
        gc.collect()
        assert [r() is not None for r in results] == [alive]
        loss.backward()


def test_it_is_computed_once_for_all_who_saved_it_and_dropped_by_the_last(device, monkeypatch):
    computed = []
    compute = Pass._compute
    monkeypatch.setattr(Pass, "_compute", lambda self, work: computed.append(work) or compute(self, work))
    model, fusion, x = fused_mixed(device)
    model(x).backward()
    assert len(computed) == 1
    assert computed[0].results is None
    held = fusion._ledger.recompute._last._held
    assert not any(r() is not None and r().results is not None for works in held.values() for r in works)


def test_a_part_of_the_graph_leaves_little_behind(device):
    """Gradients of some parameters only: what they did not ask for is not handed out, and the bound holds."""
    model = build("llama").to(device)
    fusion = tigon.fuse(model)
    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    loss = model(**inputs).loss
    first = torch.autograd.grad(loss, [model.model.layers[0].self_attn.q_proj.weight], retain_graph=True)
    held = fusion._ledger.recompute._last._held.get(loss.device, [])
    assert sum(r() is not None and r().results is not None for r in held) <= HELD
    loss.backward()
    assert torch.equal(first[0], model.model.layers[0].self_attn.q_proj.weight.grad)


@pytest.mark.parametrize("what", ["what the norm was given", "another tensor"])
def test_a_write_into_what_was_saved_is_an_error_as_in_torch(what, device):
    model, _, x = fused_mixed(device)
    inputs = x * 1.0
    loss = model(inputs)
    with torch.no_grad():
        (inputs if what == "what the norm was given" else model.one.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_result_that_was_written_into_is_kept_as_it_is(device):
    class Writes(Mixed):
        def forward(self, x, labels=None):
            y = self.norm(x)
            y.mul_(2)  # nobody has saved it yet: torch allows it
            return self.one(y).square().sum()

    torch.manual_seed(0)
    model = Writes().to(device)
    x = torch.randn(3, 5, 16, device=device)
    model(x).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tigon.fuse(model)
    model(x).backward()
    for name, g in plain.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, g, rtol=1e-5, atol=1e-5)


class Then(Mixed):
    """Does something with the norm's result before a layer saves it."""

    def __init__(self, step):
        super().__init__()
        self.norm, self.step = LlamaRMSNorm(16), step  # it runs fused under autocast too

    def forward(self, x, labels=None):
        return self.two(self.step(self.norm(x))).square().sum()


def doubled_unseen(y):
    with torch.no_grad():
        y.mul_(2)
    return y


def doubled_when_narrow(y):
    with torch.no_grad():
        return y.to(torch.bfloat16).mul_(2)


def in_memory_of_another(y):
    """The tensor stays, its memory goes, and is another one's."""
    kept.append(y)
    address = y.data_ptr()
    y.data = torch.full_like(y, 3.0)
    for _ in range(100):  # the allocator gives it out again soon
        kept.append(torch.ones_like(y).requires_grad_())
        if kept[-1].data_ptr() == address:
            break
    return kept[-1]


kept: list[torch.Tensor] = []


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("step", [doubled_unseen, doubled_when_narrow, in_memory_of_another, torch._neg_view])
def test_nothing_else_is_taken_for_the_result(step, autocast, device):
    if step is doubled_when_narrow and not autocast:
        pytest.skip("fp32 layers take no bf16")
    found = {}
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
    for level in ("none", "cheap"):
        torch.manual_seed(0)
        model = Then(step).to(device)
        tigon.fuse(model, recompute=level)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
        found[level] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    kept.clear()
    assert_same_bits(found["cheap"], found["none"])


@pytest.mark.parametrize("kind", ["sparse", "distributed"])
def test_tensors_of_other_kinds_are_saved_as_they_are(kind, process_group):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    class Other(Mixed):
        def forward(self, x, labels=None):
            y = self.two(self.norm(x)).sum()
            if kind == "sparse":
                return y + torch.sparse.mm(torch.eye(5).to_sparse().requires_grad_(), x[0]).sum()
            mesh = init_device_mesh("cpu", (1,))
            return y + distribute_tensor(x, mesh, [Replicate()]).exp().to_local().sum()

    torch.manual_seed(0)
    model = Other()
    fusion = tigon.fuse(model)
    loss = model(torch.randn(2, 5, 16, requires_grad=True))
    assert fusion.report().tensors_not_kept == 1
    loss.backward()


def test_a_norm_whose_weight_comes_and_goes_is_kept(device):
    """ZeRO-3 and FSDP2 gather a module's weight for its forward and its backward, not for those of the next module."""
    model, fusion, x = fused_mixed(device)
    weight = model.norm.weight
    whole = weight.data

    def gather(*_):
        weight.data = whole

    def release(*_):
        weight.data = whole.new_empty(0)

    model.norm.register_forward_pre_hook(gather)
    model.norm.register_forward_hook(release)
    release()
    loss = model(x)
    assert fusion.report().tensors_not_kept == 0
    assert torch.isfinite(loss)


def test_function_transforms_inside_of_the_model_say_what_to_do(device):
    class Inner(Mixed):
        def forward(self, x, labels=None):
            return self.two(self.norm(x)).sum() + torch.func.grad(lambda t: t.square().sum())(x).sum()

    model = Inner().to(device)
    with tigon.fuse(model), pytest.raises(RuntimeError, match="recompute='product'"):
        model(torch.randn(2, 5, 16, device=device))
    with tigon.fuse(model, recompute="product"):
        model(torch.randn(2, 5, 16, device=device)).backward()


def test_a_model_around_a_fused_one_takes_its_notes(device):
    torch.manual_seed(0)
    inner = Mixed().to(device)
    tigon.fuse(inner)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner, self.mix = nn.RMSNorm(16, eps=1e-6), inner, nn.Linear(16, 16)

        def forward(self, x, labels=None):
            return self.inner(self.mix(self.norm(x)))

    outer = Around().to(device)
    fusion = tigon.fuse(outer)
    outer(torch.randn(3, 5, 16, device=device)).backward()
    assert fusion.report().tensors_not_kept == (2 if fusion.model is outer else 1)


def test_other_hooks_see_everything(device):
    """Somebody who offloads what is saved does so with all of it."""
    seen = {}
    for level in ("none", "cheap"):
        model, fusion, x = fused_mixed(device, recompute=level)
        shapes = seen[level] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t):
            loss = model(x)
        loss.backward()
        assert fusion.report().tensors_not_kept == 0
    assert seen["none"] == seen["cheap"]


def test_no_hooks_without_gradients_or_after_removal(device):
    model, fusion, x = fused_mixed(device)
    with torch.no_grad():
        model(x)
    assert fusion.report().tensors_not_kept == 0
    fusion.remove()
    model(x).backward()
    assert fusion.report().tensors_not_kept == 0


def adapted(device, dtype, targets, levels, use_dora=False, autocast=False, **options):
    """Gradients of a Llama's adapters and the forward pass's report, by level; and the size of a layer's input."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=use_dora)
    model = peft.get_peft_model(build("llama").to(device, dtype), config)
    model.enable_input_require_grads()  # as the Trainer does under checkpointing
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    gradients, reports = {}, {}
    for level in levels:
        model.zero_grad()
        with tigon.fuse(model, recompute=level, **options) as fusion:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(**inputs).loss
            reports[level] = fusion.report()
            loss.backward()
        gradients[level] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients, reports, inputs["input_ids"].numel() * model.config.hidden_size


def test_adapters_save_recipes_too(device):
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    gradients, reports, _ = adapted(device, torch.float32, targets, ("none", "cheap", "mlp"))
    # Two norms in each of two layers; and the product of a gate, which the adapter of down_proj saves where no kernel
    # makes the product again.
    assert reports["cheap"].tensors_not_kept == (4 if device.type == "cuda" else 6)
    assert_same_bits(gradients["cheap"], gradients["none"])
    assert_same_bits(gradients["mlp"], gradients["none"])


@pytest.mark.parametrize("use_dora", [False, True])
def test_what_peft_widens_and_autocast_narrows_again_is_left_out(use_dora, device):
    """Each adapter that is left to PEFT widens its input to fp32, and autocast narrows that: two casts in a row."""
    gradients, reports, stream = adapted(
        device, torch.bfloat16, ["q_proj", "v_proj", "gate_proj"], ("none", "cheap"), use_dora, autocast=True,
        parts=tigon.PARTS - {"adapters"},
    )  # fmt: skip
    # Of two layers: what q, v and gate keep, each a copy of its own, is the results of two norms.
    assert reports["cheap"].bytes_not_kept >= 2 * 2 * stream * 2
    assert_same_bits(gradients["cheap"], gradients["none"])


def test_a_copy_keeps_the_level():
    model = build("llama")
    tigon.fuse(model, recompute="mlp", offload=True)
    ledger = vars(copy.deepcopy(model))["_tigon_fusion"]._ledger
    assert ledger.recompute.level == "mlp"
    assert ledger.recompute.offload is not None
    assert ledger.recompute is not vars(model)["_tigon_fusion"]._ledger.recompute


def test_an_unknown_level_is_refused_before_anything_happens():
    model = build("llama")
    with pytest.raises(ValueError, match=r"recompute must be one of \('auto', 'none', .*got 'all'"):
        tigon.fuse(model, recompute="all")
    assert "_tigon_fusion" not in vars(model)


@pytest.mark.parametrize("name", ["offload", "shared_prefix"])
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_switch_that_is_no_boolean_is_refused_before_anything_happens(name, value):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"^fuse: {name} must be True or False, got {value!r}\.$"):
        tigon.fuse(model, **{name: value})
    assert "_tigon_fusion" not in vars(model)


def test_the_command_line_knows_the_levels():
    from tigon.cli.memory import RECOMPUTE

    assert RECOMPUTE == LEVELS


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.exp(),  # saves its result
        lambda x: (x * 1).view(-1, 8).relu_(),  # saves its result, whose node is that of a view
        lambda x: (x * 1).transpose(0, 1).relu_(),
        lambda x: (x * 1).view(-1, 8) @ torch.ones(8, 2, device=x.device).t().t(),
    ],
    ids=["result", "written view", "written transpose", "view"],
)
def test_what_a_node_saves_of_its_own_does_not_keep_it_alive(step, device, monkeypatch):
    """Such a tensor knows its node: held as it is, the two would hold each other, and nothing would ever be freed."""
    kept = []
    pack = Pass.pack

    def seen(self, t):
        kept.append(weakref.ref(t.untyped_storage()))  # whose wrapper lives as long as the memory
        return pack(self, t)

    class Steps(Mixed):
        def forward(self, x, labels=None):
            return step(x).sum()

    model = Steps().to(device)
    tigon.fuse(model)
    monkeypatch.setattr(Pass, "pack", seen)
    loss = model(torch.randn(3, 5, 16, device=device, requires_grad=True))
    assert len(kept) == 1
    gc.disable()
    try:
        del loss
        assert kept[0]() is None
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------- on a GPU alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host memory is the CPU's own")
@pytest.mark.parametrize("checkpointing", [True, False, None])
def test_offloaded_is_the_same_and_leaves_the_gpu(checkpointing):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = "eager"  # the others add in any order, whatever they are told
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    ids = torch.randint(512, (4, 2048), device="cuda")
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for offload in (False, True):
        with tigon.fuse(model, recompute="none", offload=offload) as fusion:
            for _ in range(2):
                model.zero_grad()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                loss = model(input_ids=ids, labels=ids).loss
                torch.cuda.synchronize()
                kept = torch.cuda.memory_allocated() - before
                report = fusion.report()
                loss.backward()
        found[offload] = loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}, kept, report
    assert found[True][0] == found[False][0]
    assert_same_bits(found[True][1], found[False][1])
    inputs_of_layers = 6 * ids.numel() * 512 * 2
    assert found[True][3].bytes_offloaded >= inputs_of_layers
    assert found[False][2] - found[True][2] >= 0.9 * inputs_of_layers
