"""A search of the site for what users look for finds the guide first.

The index is made of the pages' sections as mkdocs-material makes it, without building the site: titles weigh 1000 times
as much as text, a page's `boost` multiplies the score, and a term matches the words that it begins. Scores are those of
lunr (BM25 with k1 = 1.2 and b = 0.75), which the site's search uses.
"""

import importlib.util
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STOP_WORDS = frozenset(
    "a an and at be by can do for from get have how i in is it my of on or the this to what with".split()  # noqa: SIM905
)
TITLE_WEIGHT, K1, B = 1000.0, 1.2, 0.75


@dataclass
class Section:
    page: str
    title: str
    words: dict[str, Counter]
    boost: float


def split_words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s\-,:!=\[\]()\"`/*|#<>.]+", text.lower()) if word not in STOP_WORDS and word]


def read_sections(page: str, text: str) -> list[Section]:
    front = re.match(r"---\nsearch:\n  boost: ([\d.]+)\n---\n", text)
    boost = float(front[1]) if front else 1.0
    text = re.sub(r"^```.*?^```$", "", text[front.end() if front else 0 :], flags=re.MULTILINE | re.DOTALL)
    # Entries of the reference are sections with the name as their title.
    text = re.sub(r"^::: [\w.]+?(\w+)\n", r"### \1\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^      members: \[(.*)\]",
        lambda names: "\n".join(f"#### {n}" for n in names[1].split(", ")),
        text,
        flags=re.MULTILINE,
    )
    sections = []
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        title, _, body = part.partition("\n")
        if title.startswith("#"):
            title = title.strip("# ")
            words = {"title": Counter(split_words(title)), "text": Counter(split_words(body))}
            sections.append(Section(page, title, words, boost))
    return sections


@pytest.fixture(scope="module")
def sections():
    hook = ROOT / "benchmarks" / "docs_pages.py"
    sys.path.insert(0, str(hook.parent))
    try:
        spec = importlib.util.spec_from_file_location("docs_pages", hook)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(hook.parent))
    pages = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    for kind in module.KINDS:
        for name in module.operators(kind):
            pages[f"ops/{name}.md"] = module.BEHIND_GUIDES + module.page_of(name)
    return [section for page, text in pages.items() for section in read_sections(page, text)]


def find_best(sections: list[Section], query: str) -> list[str]:
    """Pages, the best first, each with the score of its best section."""
    scores: dict[str, float] = {}
    for field, weight in (("title", TITLE_WEIGHT), ("text", 1.0)):
        lengths = [sum(section.words[field].values()) for section in sections]
        average = sum(lengths) / len(lengths)
        for term in split_words(query):
            vocabulary = {word for section in sections for word in section.words[field] if word.startswith(term)}
            for word in vocabulary:
                count = sum(word in section.words[field] for section in sections)
                idf = math.log(1 + abs((len(sections) - count + 0.5) / (count + 0.5)))
                for section, length in zip(sections, lengths, strict=True):
                    if n := section.words[field][word]:
                        share = (K1 + 1) * n / (K1 * (1 - B + B * length / average) + n)
                        key = (section.page, section.title)
                        scores[key] = scores.get(key, 0.0) + weight * idf * share * section.boost
    pages = sorted(scores, key=lambda key: -scores[key])
    return list(dict.fromkeys(page for page, _ in pages))


@pytest.mark.parametrize(
    ("query", "guides"),
    [
        ("out of memory", ["troubleshooting.md"]),
        ("nan", ["troubleshooting.md"]),
        ("gradient checkpointing", ["how-to/memory.md"]),
        ("label smoothing", ["how-to/fine-tune.md"]),
        ("save", ["how-to/fine-tune.md"]),
        ("how to save", ["how-to/fine-tune.md"]),
        ("resume", ["how-to/fine-tune.md"]),
        ("lora", ["how-to/lora.md"]),
        ("dpo", ["how-to/dpo.md"]),
        ("slow", ["troubleshooting.md"]),
        ("several gpus", ["how-to/several-gpus.md", "how-to/fine-tune.md"]),
    ],
)
def test_the_guide_is_found_first(sections, query, guides):
    assert find_best(sections, query)[0] in guides, find_best(sections, query)[:5]


def test_an_operator_is_found_by_its_name(sections):
    for name in ("rms_norm", "moe_mlp", "sparsemax"):
        assert find_best(sections, name)[0] == f"ops/{name}.md"
