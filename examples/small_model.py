"""A model and a tokenizer so small that the examples beside this file run on a CPU in seconds, without downloads.

With a model of your own, in place of the two functions:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ANIMALS = ["cat", "dog", "bird", "fox", "cow", "hen", "pig", "ant"]
PLACES = ["mat", "log", "tree", "hill", "road", "roof", "field", "leaf"]
PROMPTS = [f"the {animal} sat on" for animal in ANIMALS]
ANSWERS = [f" the {place} and was glad" for place in PLACES]
WRONG = [f" a {place} or not" for place in reversed(PLACES)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [prompt + answer + wrong for prompt, answer, wrong in zip(PROMPTS, ANSWERS, WRONG, strict=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<end>", padding_side="left", chat_template=CHAT_TEMPLATE
    )


def model(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
