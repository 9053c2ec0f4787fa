"""Passages for a question, by meaning and with hard filters, and the prompt made of them: retrieval for RAG.

    python examples/retrieve_rag.py

Vectors come from latent semantic analysis of the passages themselves, so that the example needs no model. Put your
encoder, such as a SentenceTransformer, in the place of `Encoder`, and hand the prompt to your language model. Needs the
extra retrieve: pip install ".[retrieve]".
"""

import math
import re
from collections import Counter

import torch

from tigon import retrieve
from tigon.retrieve import col

PASSAGES = {
    # id: product, year, public, text
    "kb-1": ("router", 2024, True, "To reset the router hold the reset button for ten seconds until the light blinks."),
    "kb-2": ("router", 2026, True, "The router updates its firmware at night. A reset keeps the new firmware."),
    "kb-3": ("router", 2026, False, "Internal: a reset of the router from the service console needs a staff key."),
    "kb-4": ("camera", 2025, True, "The camera stores its videos on a card. A full card stops the recording."),
    "kb-5": ("camera", 2026, True, "To reset the camera take out the battery and the card, then press the button."),
    "kb-6": ("router", 2025, True, "A wireless network with a weak signal is slow. Place the router higher."),
    "kb-7": ("camera", 2024, True, "The battery of the camera lasts a week. Cold weather empties the battery sooner."),
    "kb-8": (
        "printer",
        2026,
        True,
        "Paper jams in the printer are cleared from the back. Open the lid, pull the paper.",
    ),
    "kb-9": ("printer", 2025, True, "The printer joins the wireless network by its menu, and needs a password."),
    "kb-10": ("router", 2023, True, "The password of the wireless network is printed on the back of the router."),
}
PROMPT = (
    "Answer from these passages alone, and name those that you used.\n\n{passages}\n\nQuestion: {question}\nAnswer:"
)


class Encoder:
    """Latent semantic analysis: TF-IDF of words, and its largest singular vectors."""

    def __init__(self, texts, dim):
        self.words = {word: i for i, word in enumerate(sorted({w for text in texts for w in self.split(text)}))}
        seen = Counter(word for text in texts for word in set(self.split(text)))
        self.rarity = torch.tensor([math.log((1 + len(texts)) / (1 + seen[word])) + 1 for word in self.words])
        self.basis = torch.linalg.svd(self.counts(texts), full_matrices=False).Vh[:dim].T

    def split(self, text):
        return [word[:6] for word in re.findall(r"[a-z]{3,}", text.lower())]  # a stem, nearly

    def counts(self, texts):
        rows = torch.zeros(len(texts), len(self.words))
        for row, text in zip(rows, texts, strict=True):
            for word in self.split(text):
                if word in self.words:
                    row[self.words[word]] += 1
        return rows * self.rarity

    def encode(self, texts):
        return self.counts(texts) @ self.basis


texts = {name: text for name, (*_, text) in PASSAGES.items()}
encoder = Encoder(list(texts.values()), dim=8)
index = retrieve.Index(
    dim=8, capacity=1000, metric="cosine", dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu",
    schema=retrieve.Schema(product=retrieve.Category(), year=retrieve.Number(), public=retrieve.Category()),
)  # fmt: skip
retriever = retrieve.Retriever(encoder, index)


def write(passages):
    """Put passages into the index: from now on they are found."""
    product, year, public, text = map(list, zip(*passages.values(), strict=True))
    vectors = encoder.encode(text)
    index.upsert(list(passages), vectors, {"product": product, "year": year, "public": public})


def prompt_of(question, where, k=2):
    """The question with the best passages that pass the filter."""
    hits = retriever([question], k=k, where=where)
    found = [name for name in hits.ids[0] if name is not None]
    return PROMPT.format(passages="\n".join(f"[{name}] {texts[name]}" for name in found), question=question)


write(PASSAGES)
allowed = col("public") == 1  # what this reader may see, whatever the question is
for question, where in (
    ("How do I reset the router?", allowed & (col("product") == "router") & (col("year") >= 2024)),
    ("How do I reset it?", allowed & (col("product") == "camera")),
    ("Where is the password of the network?", allowed),
):
    print(prompt_of(question, where), "…\n")

# A passage is found from the moment it is written, and not any more once it is deleted.
new = ("router", 2026, True, "To reset the router open its page and choose restart. New models have no button.")
texts["kb-11"] = new[-1]
write({"kb-11": new})
index.delete(["kb-1"])
print("After an update:\n\n" + prompt_of("How do I reset the router?", allowed), "…")
