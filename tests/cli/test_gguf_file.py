"""GGUF files read back: by gguf and transformers, and by llama.cpp itself where xllamacpp is installed."""

import json
import urllib.request

import pytest
import torch

pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tigon.cli import gguf_file
from tigon.cli.problem import Problem

CORPUS = [
    "The cat sat on the mat, and was glad. don't I'M we'LL x = foo(1);\r\n\tÜnïcödé 漢字 привет 12345 67\n\n " * 20
]
TEXTS = [
    "hello world", " hello  world", "don't I'M we'LL they've", "1234567 12 3", "漢字テスト Ünïcödé",
    "a\n\n\nb\t\tc  \n d", "for(i=0;i<10;i++){}\r\n", "😀👍🏽!", "CamelCaseWORD fooBar/bar//", "   ", "x", "\n", "end ",
    "<|im_start|>user\nhi",
]  # fmt: skip
END = "<|endoftext|>"


def train_bpe(pre_tokenizer, *, ignore_merges=False, normalizer=None):
    """A tokenizer over bytes."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END, "<|im_start|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, chat_template="{{ 1 }}")


def cut_by(pattern):
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])


def train_sentence_piece(normalizer, pre_tokenizer=None):
    """A tokenizer as of SentencePiece: pieces with ▁ for spaces, and bytes for unknown characters."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=40)
    trained.train_from_iterator(CORPUS, trainer)
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    stored, found = json.loads(backend.to_str()), json.loads(trained.to_str())["model"]
    stored["model"] |= {name: found[name] for name in ("vocab", "merges")}
    backend = Tokenizer.from_str(json.dumps(stored))
    backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("\n\n", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SPACES = normalizers.Replace(" ", "▁")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "gpt-2": lambda: train_bpe(BYTES),
    "smollm": lambda: train_bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])),
    "llama-bpe": lambda: train_bpe(cut_by(gguf_file._LLAMA_3), ignore_merges=True),
    "smaug-bpe": lambda: train_bpe(cut_by(gguf_file._LLAMA_3)),
    "qwen2": lambda: train_bpe(cut_by(gguf_file._QWEN_2), normalizer=normalizers.NFC()),
    "tekken": lambda: train_bpe(cut_by(gguf_file._TEKKEN), ignore_merges=True),
    "llama": lambda: train_sentence_piece(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])),
    "gemma": lambda: train_sentence_piece(SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
}
ROPE = {"rope_theta": 10000.0, "factor": 8.0}
SLOWED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TIED = {"tie_word_embeddings": True}  # llama.cpp has no other head for Gemma 1 and 2
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 8}
# Each family with a tokenizer: all tokenizers, and all rotary embeddings.
MODELS = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "llama3", **ROPE, **SLOWED}, "mlp_bias": True}, "llama-bpe"),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}, "attention_bias": True}, "smaug-bpe"),
    "mistral": ("mistral", {"sliding_window": None}, "llama"),
    "nemo": ("mistral", {"sliding_window": None}, "tekken"),
    "qwen2": ("qwen2", {"head_dim": 16, **TIED}, "qwen2"),
    "qwen3": ("qwen3", {}, "smollm"),
    "gemma": ("gemma", {"hidden_activation": "gelu_pytorch_tanh", **TIED}, "gemma"),
    "gemma2": ("gemma2", {**WINDOWS, **TIED}, "gpt-2"),
    "gemma3": ("gemma3_text", {**WINDOWS, "num_hidden_layers": 6}, "gemma"),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in TOKENIZERS.items()}


def make_model(name, tokenizers):
    kind, more, pre = MODELS[name]
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    # Three embeddings have no token, as where a vocabulary is rounded up.
    config = AutoConfig.for_model(kind, **{**sizes, **more}, vocab_size=len(tokenizers[pre]) + 3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # zeros would hide errors in their use
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "embed" not in parameter_name:
            parameter.data *= 4
    return model, tokenizers[pre]


def compute_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"mistral", "nemo", "gemma"}))  # it reads no more
def test_transformers_reads_the_same_model(name, tokenizers, tmp_path):
    pytest.importorskip("gguf")
    model, tokenizer = make_model(name, tokenizers)
    gguf_file.write_gguf(model, tokenizer, tmp_path / "m.gguf", "float32", name="mine")
    # With a configuration: transformers reads few sizes and no scaled angles from a file.
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=model.config).eval()
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.testing.assert_close(compute_logits(found, ids), compute_logits(model, ids), atol=1e-5, rtol=1e-5)


def test_types_round_as_torch_does(tokenizers, tmp_path):
    gguf = pytest.importorskip("gguf")
    model, tokenizer = make_model("qwen3", tokenizers)
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    for dtype, kind in gguf_file.TYPES.items():
        file = tmp_path / f"{kind}.gguf"
        gguf_file.write_gguf(model, tokenizer, file, dtype, name="mine")
        reader = gguf.GGUFReader(file)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
        up = tensors["blk.0.ffn_up.weight"]
        assert up.tensor_type.name == kind
        values = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type).copy())
        if dtype == "q8_0":  # a scale for 32 numbers, rounded to fp16
            bound = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127 * 0.57
            assert ((values - weight).unflatten(-1, (-1, 32)).abs() <= bound).all()
        else:
            assert torch.equal(values, weight.to(getattr(torch, dtype)).float())
        assert reader.get_field("general.name").contents() == "mine"
        assert reader.get_field("general.file_type").contents() == {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}[kind]
        assert reader.get_field("tokenizer.ggml.pre").contents() == "smollm"
        assert reader.get_field("tokenizer.chat_template").contents() == "{{ 1 }}"
        assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == len(tokenizer) + 3


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name, tokenizers, tmp_path):
    """Tokens of difficult texts, and the log-probabilities of the next token over the vocabulary."""
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("xllamacpp")
    model, tokenizer = make_model(name, tokenizers)
    gguf_file.write_gguf(model, tokenizer, tmp_path / "m.gguf", "float32")
    options = llama_cpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(tmp_path / "m.gguf"), 256, 1, False
    options.cpuparams.n_threads, options.fit_params, options.verbosity = 1, False, -1
    options.cache_type_k = options.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama_cpp.Server(options)

    def ask(path, **body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
        return json.loads(urllib.request.urlopen(request).read())

    for text in TEXTS + CORPUS:
        found = ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text).input_ids, text
    ids = tokenizer(CORPUS[0]).input_ids[:60]
    while True:  # the server sends no probabilities after a part of a character
        found = ask("/completion", prompt=ids, n_predict=1, n_probs=model.config.vocab_size, temperature=0)
        if "completion_probabilities" in found or len(ids) < 30:
            break
        ids = ids[:-1]
    rows = found["completion_probabilities"][0]["top_logprobs"]
    expected = compute_logits(model, ids)[-1].log_softmax(-1)
    values = torch.tensor([row["logprob"] for row in rows])
    assert len(rows) >= len(tokenizer)
    assert expected.std() > 0.1
    # ggml rounds GELU to fp16.
    tolerance = 5e-3 if "gemma" in name else 1e-5
    torch.testing.assert_close(values, expected[[row["id"] for row in rows]], atol=tolerance, rtol=0)


def test_pre_tokenizers_are_recognised(tokenizers):
    for name, tokenizer in tokenizers.items():
        found = gguf_file.read_vocabulary(tokenizer, len(tokenizer))
        assert found.pre == (name if found.model == "gpt2" else "default")
        assert found.adds_space == (name == "llama")
        assert found.template == tokenizer.chat_template
    vocabulary = gguf_file.read_vocabulary(tokenizers["llama"], 500)
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert [types[token] for token in ("<unk>", "<s>", "<0x0A>", "\n\n", "▁", "[PAD499]")] == [2, 3, 6, 4, 1, 5]
    ranks = [score for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True) if types[token] == 1]
    assert sorted(ranks, reverse=True) == ranks  # in the order in which SentencePiece learned the pieces


def change(tokenizer, **parts):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def test_tokenizers_that_llama_cpp_cuts_otherwise_are_refused(tokenizers):
    plain, piece = tokenizers["gpt-2"], tokenizers["gemma"]
    stripped = change(plain)
    stripped.add_tokens([AddedToken("<mask>", lstrip=True)], special_tokens=True)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    cases = [
        (change(plain, pre_tokenizer=cut_by(r"\d+")), "no known name for .known: gpt-2, .* by --pre"),
        (change(plain, normalizer=normalizers.Lowercase()), "no known name for"),
        (change(plain, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "no known name for"),
        (change(piece, normalizer=normalizers.NFKC()), "it changes texts by NFKC first"),
        (change(piece, pre_tokenizer=pre_tokenizers.Whitespace()), "it cuts texts by Whitespace first"),
        (change(piece, pre_tokenizer=pre_tokenizers.Metaspace(split=False)), "--pre default writes"),
        (stripped, "<mask> takes the spaces around it"),
        (words, "its model is WordLevel, not BPE"),
    ]
    for tokenizer, sentence in cases:
        with pytest.raises(Problem, match=sentence):
            gguf_file.read_vocabulary(tokenizer, 1000)
    assert gguf_file.read_vocabulary(cases[0][0], 1000, "mine").pre == "mine"
    with pytest.raises(Problem, match=r"the tokenizer has \d+ tokens, and the model 9 embeddings"):
        gguf_file.read_vocabulary(plain, 9)


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("phi3", {"pad_token_id": 0}, "phi3 models are not among llama, mistral"),
        ("llama", {"hidden_act": "gelu"}, "the activation is gelu"),
        ("mistral", {"sliding_window": 4096}, "its layers have attention windows"),
        (
            "gemma2",
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "its layers have attention windows",
        ),
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144"),
        ("qwen2", {"head_dim": 256}, "its heads have 256 columns"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "is yarn"),
        ("qwen3", {"rope_parameters": {"rope_type": "llama3", **ROPE, **SLOWED}}, "is llama3"),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(kind, more, sentence):
    with pytest.raises(Problem, match=f"{sentence}.*python convert_hf_to_gguf.py DIR"):
        gguf_file.check_family(AutoConfig.for_model(kind, **more))


def test_the_command_writes_a_file(here, checkpoint, tmp_path):
    out = tmp_path / "m.gguf"
    gguf = pytest.importorskip("gguf")
    here("export", checkpoint, "--to", "gguf", "-o", tmp_path / "m.bin").problem("--output must end in .gguf")
    assert "m.gguf" in here("export", checkpoint, "--to", "gguf", "-o", out, "--dtype", "q8_0").ok().out
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert kinds["blk.1.attn_q.weight"] == "Q8_0"
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    here("export", checkpoint, "--to", "gguf", "-o", out).problem("already exists; --overwrite replaces it")
