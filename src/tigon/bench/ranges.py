"""The ranges that the sweep (see sweep.py) draws sizes from: those of published models, and any number of tokens.

A `Dice` is a function of its words alone, and takes nothing but `random.Random.random()`, whose numbers are the same in
every version of Python: a draw is the same list of sizes on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tigon.presets import PRESETS

T = TypeVar("T")


class Model(NamedTuple):
    """What the operators see of a decoder: the sizes of its config.json."""

    width: int
    inner: int
    heads: int
    keys: int
    head_width: int
    vocabulary: int


class Experts(NamedTuple):
    """One mixture: the width of the model, that of an expert, how many there are, and how many a token chooses."""

    width: int
    inner: int
    experts: int
    choices: int


def _of_preset(fields: dict[str, Any]) -> Model:
    fields = fields.get("text_config", fields)
    heads = fields["num_attention_heads"]
    return Model(
        fields["hidden_size"],
        fields["intermediate_size"],
        heads,
        fields["num_key_value_heads"],
        fields.get("head_dim") or fields["hidden_size"] // heads,
        fields["vocab_size"],
    )


# Presets that nobody has published.
_MADE_UP = ("llama-tiny", "llama-20m", "llama-60m")
# The other presets, and models of widths and vocabularies that no preset has; each as its config.json says.
MODELS: dict[str, Model] = {
    **{name: _of_preset(fields) for name, fields in PRESETS.items() if name not in _MADE_UP},
    "smollm2-135m": Model(576, 1536, 9, 3, 64, 49152),
    "gpt2": Model(768, 3072, 12, 12, 64, 50257),
    "qwen2.5-0.5b": Model(896, 4864, 14, 2, 64, 151936),
    "bloom-560m": Model(1024, 4096, 16, 16, 64, 250880),
    "gemma-3-1b": Model(1152, 6912, 4, 1, 256, 262144),
    "gpt2-xl": Model(1600, 6400, 25, 25, 64, 50257),
    "stablelm-2-1.6b": Model(2048, 5632, 32, 32, 64, 100352),
    "minicpm-2b": Model(2304, 5760, 36, 36, 64, 122753),
    "phi-2": Model(2560, 10240, 32, 32, 80, 51200),
    "starcoder2-3b": Model(3072, 12288, 24, 2, 128, 49152),
    "yi-6b": Model(4096, 11008, 32, 4, 128, 64000),
    "falcon-7b": Model(4544, 18176, 71, 1, 64, 65024),
    "qwen2.5-32b": Model(5120, 27648, 40, 8, 128, 152064),
    "gemma-3-27b": Model(5376, 21504, 32, 16, 128, 262208),
    "gpt-neox-20b": Model(6144, 24576, 64, 64, 96, 50432),
    "llama-3-70b": Model(8192, 28672, 64, 8, 128, 128256),
    "command-r": Model(8192, 22528, 64, 64, 128, 256000),
}
MIXTURES: dict[str, Experts] = {
    "mixtral-8x7b": Experts(4096, 14336, 8, 2),
    "phi-3.5-moe": Experts(4096, 6400, 16, 2),
    "granite-3.1-1b-a400m": Experts(1024, 512, 32, 8),
    "olmoe-1b-7b": Experts(2048, 1024, 64, 8),
    "qwen1.5-moe-a2.7b": Experts(2048, 1408, 60, 4),
    "deepseek-v2-lite": Experts(2048, 1408, 64, 6),
    "qwen3-30b-a3b": Experts(2048, 768, 128, 8),
    "glm-4.5-air": Experts(4096, 1408, 128, 8),
}
GPT_OSS: dict[str, Experts] = {"gpt-oss-20b": Experts(2880, 2880, 32, 4), "gpt-oss-120b": Experts(2880, 2880, 128, 4)}
# The families whose small models are drawn: every published preset of text.
FAMILIES = [name for name, fields in PRESETS.items() if name not in _MADE_UP and "text_config" not in fields]
# Channels of the convolutions of diffusion models, and the sides of their pictures.
CHANNELS = (128, 256, 320, 512, 640, 960, 1280, 1920, 2560)
SIDES = (8, 16, 24, 32, 64, 96, 128)

# The form of Gemma's norms, as arguments of the operator.
GEMMA = {"offset": 1.0, "cast": "gemma"}
TOKENS = 65536
# Where only the drawing is tried, on a CPU.
TINY_TOKENS = 32
TINY_MODELS = {"tiny": Model(24, 40, 2, 1, 16, 50), "tiny-2": Model(32, 64, 4, 2, 16, 67)}
TINY_MIXTURES = {"tiny": Experts(16, 8, 4, 2)}


class Dice:
    """Numbers drawn from words: the same words, the same numbers.

    tiny: sizes for a CPU.
    """

    def __init__(self, *words: object, tiny: bool = False) -> None:
        self.tiny = tiny
        # A text is hashed by SHA-512, not by the process's own hash.
        self._random = random.Random("/".join(map(str, words)))

    def share(self) -> float:
        """From 0 to 1."""
        return self._random.random()

    def among(self, *values: T) -> T:
        return values[int(self.share() * len(values))]

    def tokens(self, most: int = TOKENS) -> int:
        """1 to `most`, a power of two. Half are powers of two, the others odd; equally many in every octave."""
        octaves = min(most, TINY_TOKENS if self.tiny else most).bit_length() - 1
        low = 1 << int(self.share() * (octaves + 1))
        inside, rounded = int(self.share() * low), self.share() < 0.5
        return low if rounded or low >= 1 << octaves else (low + inside) | 1

    def model(self) -> Model:
        """A published model; one in four has a vocabulary that a few added tokens have made larger."""
        table = TINY_MODELS if self.tiny else MODELS
        found = table[self.among(*table)]
        added, extends = 1 + int(self.share() * 16), self.share() < 0.25
        return found._replace(vocabulary=found.vocabulary + added * extends)

    def mixture(self, table: dict[str, Experts]) -> Experts:
        table = TINY_MIXTURES if self.tiny else table
        return table[self.among(*table)]


@dataclass(frozen=True)
class Drawn:
    """One draw of a case: its shape, and options beside the shape.

    options: of a model its family and further sizes; of an operator "ignored", the fraction of targets that do not
        count, and arguments of the implementations.
    """

    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


Drawing = Callable[[Dice], Drawn]


def rows(dice: Dice) -> Drawn:
    return Drawn((dice.tokens(), dice.model().width))


def rms_rows(dice: Dice) -> Drawn:
    """As rows; one in four is Gemma's form of the norm."""
    return Drawn(rows(dice).shape, dice.among({}, {}, {}, GEMMA))


def inner_rows(dice: Dice) -> Drawn:
    return Drawn((dice.tokens(), dice.model().inner))


def logits(dice: Dice) -> Drawn:
    return Drawn((dice.tokens(), dice.model().vocabulary))


def scores(dice: Dice) -> Drawn:
    """Rows of a vocabulary, or of attention over a context: of two tokens at least, or the gradient is zero."""
    return Drawn((dice.tokens(), max(2, dice.tokens(16384)))) if dice.share() < 0.5 else logits(dice)


def labelled_logits(dice: Dice) -> Drawn:
    options = {"ignored": dice.among(0.0, 0.0, 0.25, 0.5), "label_smoothing": dice.among(0.0, 0.0, 0.0, 0.1)}
    return Drawn(logits(dice).shape, {name: value for name, value in {**options, **softcap(dice)}.items() if value})


def softcap(dice: Dice) -> dict[str, float]:
    """Gemma 2's, in one draw of four."""
    return dice.among({}, {}, {}, {"softcap": 30.0})


def table_rows(dice: Dice) -> Drawn:
    model = dice.model()
    return Drawn((dice.tokens(), model.vocabulary, model.width))


def down_projection(dice: Dice) -> Drawn:
    model = dice.model()
    return Drawn((dice.tokens(), model.inner, model.width))


def rms_heads(dice: Dice) -> Drawn:
    model = dice.model()
    shape = dice.among(1, 2, 4, 8), dice.tokens(16384), model.heads, model.head_width
    return Drawn(shape, dice.among({}, {}, {}, GEMMA))


def queries_and_keys(dice: Dice) -> Drawn:
    model = dice.model()
    return Drawn((dice.among(1, 2, 4, 8), dice.tokens(16384), model.heads, model.keys, model.head_width))


def shared_prefixes(dice: Dice) -> Drawn:
    """Prompts with their completions: requests, tokens of a prefix, suffixes of each, tokens of a suffix, heads."""
    model = dice.model()
    sizes = dice.among(1, 2, 4), dice.tokens(4096), dice.among(2, 4, 8, 32), dice.tokens(512)
    return Drawn((*sizes, model.heads, model.keys, model.head_width))


def channels(dice: Dice) -> Drawn:
    """A group norm of pictures: 32 groups, and a position for each pixel."""
    if dice.tiny:
        return Drawn((dice.among(1, 2, 3), 8, 4, dice.among(4, 9)))
    return Drawn((dice.among(1, 2, 4, 8, 16), dice.among(*CHANNELS), 32, dice.among(*SIDES) ** 2))


def head(dice: Dice) -> Drawn:
    """Hidden states and the head's weight."""
    model = dice.model()
    return Drawn((dice.tokens(), model.width, model.vocabulary))


def capped_head(dice: Dice) -> Drawn:
    return Drawn(head(dice).shape, softcap(dice))


def sequences(dice: Dice) -> Drawn:
    """Pairs of sequences of one length."""
    model = dice.model()
    return Drawn((dice.among(2, 4, 8, 16), dice.tokens(8192), model.width, model.vocabulary))


def mixture(table: dict[str, Experts]) -> Drawing:
    def draw(dice: Dice) -> Drawn:
        return Drawn((dice.tokens(16384), *dice.mixture(table)))

    return draw


def small_model(dice: Dice) -> Drawn:
    """Batch, tokens, layers and width of a small model of a published family."""
    family = dice.among(*FAMILIES)
    head_width, grouped = dice.among(64, 128), dice.among(1, 2, 4)
    width = dice.among(256, 512, 768, 1024, 1536, 2048)
    batch, tokens, layers = dice.among(1, 2, 4, 8), max(16, dice.tokens(4096)), dice.among(2, 3, 4)
    inner = width * dice.among(11, 14, 16) // 4
    own = MODELS[family].vocabulary
    vocabulary, experts = dice.among(own, own, 32000, 50257), dice.among(8, 16, 32)
    if dice.tiny:
        width, head_width, layers, inner, vocabulary, experts = 64, 16, 1, 96, 67, 4
    heads = width // head_width
    keys = heads // grouped if heads % grouped == 0 else heads
    sizes = {"heads": heads, "keys": keys, "head_width": head_width, "inner": inner, "vocabulary": vocabulary}
    mixture = {"experts": experts} if "num_experts_per_tok" in PRESETS[family] else {}
    return Drawn((batch, tokens, layers, width), {"family": family, **sizes, **mixture})
