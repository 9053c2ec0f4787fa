"""A tiny model and tokenizer, and requests, for the tests of prompt rankers."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tigon.rank.models.prompt import Prompt, Request

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think is defined %}<think>{% endif %}{% endif %}"
)
TOLD = {
    "instruction": "Films that a member rated.",
    "profile": "Age {{ age }}, {{ occupation }}.",
    "event": "{{ title }} ({{ year }}): {{ rating }} of 5, {{ ago }} before",
    "candidate": "Film: {{ title }} ({{ year }}).",
    "tasks": {
        "like": {"question": "Will they rate it 4 or more?", "answers": {"yes": 1, "no": 0}, "label": "rating >= 4"},
        "stars": {
            "question": "How many stars for {{ title }}?",
            "answers": {"1": 1, "2": 2, "3": 3, "4": 4, "5": 5}, "label": "rating", "weight": 0.5,
        },
    },
}  # fmt: skip
WORDS = ["Heat", "Fargo", "Alien", "Brazil", "Casino", "Psycho", "Rocky", "Vertigo"]


def tokenizer(chat=True):
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|im_start|>", "<|im_end|>", "<|unused|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokens.train_from_iterator([f"Film: {w} (1995). yes no rate it stars" for w in WORDS] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHAT if chat else None,
        additional_special_tokens=["<|im_start|>", "<|unused|>"],
    )  # fmt: skip


def model(seed=0, positions=512, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(**{
        "vocab_size": 448, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions,
        "initializer_range": 0.3, **options,
    })  # fmt: skip
    return LlamaForCausalLM(config)


def prompt(**changes):
    return Prompt.from_dict({**TOLD, **changes})


def film(i, **more):
    return {"title": WORDS[i % 8], "year": 1990 + i, **more}


def requests():
    """Three, of 4, 1 and 2 candidates, with 3, 0 and 1 events."""
    return [
        Request(
            [film(i, rating=1 + (3 * i) % 5) for i in range(4)],
            {"age": 30.0, "occupation": "cook"},
            [film(i, rating=i, ago=f"{9 - i} days") for i in range(4, 7)],
        ),
        Request([film(7, rating=4)], {"age": 41, "occupation": None}),
        Request(
            [film(2, rating=3), film(3, rating=None)],
            {"age": 19, "occupation": "pilot"},
            [film(1, rating=5, ago="1 day")],
        ),
    ]
