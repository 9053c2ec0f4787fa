"""An example of use for the page of every operator. tests/bench/test_docs_pages.py runs each."""

IMPORTS = "import tigon\nimport torch\n"

EXAMPLES = {
    "rms_norm": """\
x, weight = torch.randn(2, 128, 64, requires_grad=True), torch.ones(64, requires_grad=True)
y = tigon.rms_norm(x, weight, eps=1e-6)
y.sum().backward()
""",
    "add_rms_norm": """\
x, weight = torch.randn(2, 128, 64, requires_grad=True), torch.ones(64, requires_grad=True)
residual = torch.randn(2, 128, 64)
y, residual = tigon.add_rms_norm(x, residual, weight)
""",
    "layer_norm": """\
x, weight = torch.randn(2, 128, 64, requires_grad=True), torch.ones(64, requires_grad=True)
bias = torch.zeros(64, requires_grad=True)
y = tigon.layer_norm(x, weight, bias)
""",
    "group_norm": """\
x = torch.randn(2, 32, 16, 16, requires_grad=True)  # (batch, channels, …)
y = tigon.group_norm(x, 8, torch.ones(32), torch.zeros(32))
""",
    "dyt": """\
x, alpha = torch.randn(2, 128, 64, requires_grad=True), torch.tensor(0.5, requires_grad=True)
y = tigon.dyt(x, alpha, torch.ones(64), torch.zeros(64))
""",
    "poly_norm": """\
x = torch.randn(2, 128, 64, requires_grad=True)
y = tigon.poly_norm(x, torch.full((3,), 1 / 3), torch.tensor(1.0))
""",
    "swiglu": """\
gate, up = torch.randn(2, 128, 256, requires_grad=True), torch.randn(2, 128, 256, requires_grad=True)
y = tigon.swiglu(gate, up)
""",
    "geglu": """\
gate, up = torch.randn(2, 128, 256, requires_grad=True), torch.randn(2, 128, 256, requires_grad=True)
y = tigon.geglu(gate, up, approximate="tanh")
""",
    "reglu": """\
gate, up = torch.randn(2, 128, 256, requires_grad=True), torch.randn(2, 128, 256, requires_grad=True)
y = tigon.reglu(gate, up)
""",
    "relu2": """\
x = torch.randn(2, 128, 64, requires_grad=True)
y = tigon.relu2(x)
""",
    "gated_residual": """\
x, gate, f = (torch.randn(2, 128, 64, requires_grad=True) for _ in range(3))
y = tigon.gated_residual(x, gate, f)
""",
    "gated_linear": """\
from tigon.ops.gated_linear import gated_linear

gate, up = torch.randn(2, 128, 256, requires_grad=True), torch.randn(2, 128, 256, requires_grad=True)
weight = torch.randn(64, 256, requires_grad=True)
y = gated_linear(gate, up, weight, act="silu")
""",
    "moe_mlp": """\
T, K, E, D, I = 32, 2, 4, 64, 96  # tokens, choices, experts, widths
x, gate_up, down = torch.randn(T, D), torch.randn(E, 2 * I, D), torch.randn(E, D, I)
top_k_weights, top_k_index = torch.randn(T, E).softmax(-1).topk(K)  # the router's choice
y = tigon.moe_mlp(x, top_k_index, top_k_weights, gate_up, down)
""",
    "rope": """\
q, k = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64)  # (batch, heads, tokens, width of a head)
angles = torch.outer(torch.arange(128), 1e4 ** -torch.arange(0, 1, 2 / 64)).repeat(1, 2).expand(2, -1, -1)
cos, sin = angles.cos(), angles.sin()  # (batch, tokens, width of a head)
q, k = tigon.rope(q, k, cos, sin)
""",
    "qk_norm_rope": """\
q, k = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64)  # (batch, heads, tokens, width of a head)
angles = torch.outer(torch.arange(128), 1e4 ** -torch.arange(0, 1, 2 / 64)).repeat(1, 2).expand(2, -1, -1)
cos, sin = angles.cos(), angles.sin()  # (batch, tokens, width of a head)
q, k = tigon.qk_norm_rope(q, k, torch.ones(64), torch.ones(64), cos, sin)
""",
    "softmax": """\
x = torch.randn(8, 1000, requires_grad=True)
y = tigon.softmax(x, -1)
""",
    "sparsemax": """\
x = torch.randn(8, 1000, requires_grad=True)
y = tigon.sparsemax(x)  # most entries are 0
""",
    "outer_softmax": """\
qkv = torch.randn(256, 3 * 32, requires_grad=True)  # q, k and v of 32 numbers each
y = tigon.outer_softmax(qkv, temperature=2.0)  # (256, 32)
""",
    "prefix_attention": """\
layout = tigon.PrefixLayout([40, 10], [[3, 2], [2, 1, 4]])  # lengths of two prompts and of their answers
q, k, v = torch.randn(62, 8, 64), torch.randn(62, 2, 64), torch.randn(62, 2, 64)  # all prompts, then all answers
y = tigon.prefix_attention(q, k, v, layout)  # (62, 8, 64)
""",
    "cross_entropy": """\
logits = torch.randn(4, 128, 1000, requires_grad=True)
target = torch.randint(1000, (4, 128))
loss = tigon.cross_entropy(logits, target, config=tigon.CrossEntropy(label_smoothing=0.1))
loss.backward()
""",
    "kl_div": """\
student, teacher = torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000)
loss = tigon.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True)
loss.backward()
""",
    "jsd": """\
student, teacher = torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000)
loss = tigon.jsd(student, teacher, temperature=2.0)  # of logits
loss.backward()
""",
    "tvd": """\
student, teacher = torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000)
loss = tigon.tvd(student.softmax(-1), teacher.softmax(-1))
loss.backward()
""",
    "logprob": """\
logits = torch.randn(4, 128, 1000, requires_grad=True)
target = torch.randint(1000, (4, 128))
result = tigon.logprob(logits, target)
print(result.logprob.shape, result.entropy.shape)
""",
    "linear_cross_entropy": """\
x = torch.randn(4, 128, 64, requires_grad=True)  # hidden states
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
loss = tigon.linear_cross_entropy(x, weight, target)
loss.backward()
""",
    "linear_logprob": """\
x = torch.randn(4, 128, 64, requires_grad=True)  # hidden states
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
result = tigon.linear_logprob(x, weight, target)
result.logprob.sum().backward()
""",
    "dpo": """\
from tigon.losses import dpo

x = torch.randn(4, 128, 64, requires_grad=True)  # of two chosen sequences, then of two rejected ones
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
ref = torch.full((2,), -900.0), torch.full((2,), -900.0)  # log-probabilities under the reference
loss, metrics = dpo(x, weight, target, ref)
loss.backward()
""",
    "orpo": """\
from tigon.losses import orpo

x = torch.randn(4, 128, 64, requires_grad=True)  # of two chosen sequences, then of two rejected ones
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
loss, metrics = orpo(x, weight, target)
loss.backward()
""",
    "grpo": """\
from tigon.losses import grpo

x = torch.randn(4, 128, 64, requires_grad=True)  # hidden states
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
advantages = torch.randn(4)  # of each completion
loss, metrics = grpo(x, weight, target, advantages)
loss.backward()
""",
    "distill": """\
from tigon.losses import Hidden, distill

x = torch.randn(4, 128, 64, requires_grad=True)  # hidden states
weight = torch.randn(1000, 64, requires_grad=True)  # of the head
target = torch.randint(1000, (4, 128))  # target[s, t] is the token that x[s, t] predicts
teacher = Hidden(torch.randn(4, 128, 96), torch.randn(1000, 96))
loss, metrics = distill(x, weight, teacher)
loss.backward()
""",
    "embedding": """\
ids, weight = torch.randint(1000, (2, 128)), torch.randn(1000, 64, requires_grad=True)
y = tigon.embedding(ids, weight)
""",
    "embedding_bag": """\
weight, ids = torch.randn(1000, 64, requires_grad=True), torch.randint(1000, (32, 8))
y = tigon.embedding_bag(ids, weight)  # (32, 64): the mean of each row's vectors
""",
    "quantized_embedding": """\
table, ids = torch.randn(1000, 32), torch.randint(1000, (64, 8))
codes, scale_offset = tigon.quantize_rows(table)  # 36 bytes a row instead of 128
y = tigon.quantized_embedding(codes, scale_offset, ids)  # (64, 32)
""",
}
