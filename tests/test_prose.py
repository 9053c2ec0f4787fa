"""Comments, docstrings and pages are plain English: few "of", "it", "one" and "what" per 1,000 words.

The bounds are kept by well-written libraries in the field. A folder above a bound has an allowance, which may only
fall.
"""

import ast
import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWANCES = Path(__file__).parent / "allowances" / "prose.json"
BOUNDS = {"of": 25.0, "it": 8.0, "one": 6.0, "what": 1.5}  # per 1,000 words
WORDS = {"of": "of", "it": "it", "its": "it", "one": "one", "ones": "one", "what": "what"}
CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)
FRONTED = re.compile(r"(?:^|[.!?:]\s+|\n\s*\n\s*)Of (?!course\b)")


def read_comments(path: Path) -> str:
    """A Python file's comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    comments = [
        t.string.lstrip("# ")
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
        if t.type == tokenize.COMMENT
    ]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return "\n".join([*comments, *docstrings])


def read_places() -> dict[str, str]:
    """The prose in each package folder and in each page folder."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "tigon").rglob("*.py")):
        parts = path.relative_to(ROOT / "src" / "tigon").parts
        places.setdefault(f"src/tigon/{parts[0]}" if len(parts) > 1 else "src/tigon", []).append(read_comments(path))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        parts = path.relative_to(ROOT).parts
        place = "/".join(parts[:-1]) or parts[0]
        places.setdefault(place, []).append(CODE.sub(" ", path.read_text(encoding="utf-8")))
    return {place: "\n\n".join(texts) for place, texts in places.items()}


def measure(text: str) -> dict[str, float]:
    """Occurrences per 1,000 words for each bounded word."""
    words = re.findall(r"[A-Za-z']+", text.lower())
    counts = Counter(WORDS[word] for word in words if word in WORDS)
    return {word: round(1000 * counts[word] / max(len(words), 1), 1) for word in BOUNDS}


PLACES = read_places()
ALLOWED: dict[str, dict[str, float]] = json.loads(ALLOWANCES.read_text()) if ALLOWANCES.exists() else {}


@pytest.mark.parametrize("place", PLACES)
def test_words_keep_their_bounds(place):
    rates, allowed = measure(PLACES[place]), ALLOWED.get(place, {})
    above = {w: r for w, r in rates.items() if r > max(BOUNDS[w], allowed.get(w, 0))}
    assert not above, f"{place}: {above} per 1,000 words, bounds {BOUNDS | allowed}"
    lower = {w: r for w, r in rates.items() if w in allowed and r < allowed[w] - 1}
    assert not lower, f"{place} has become better, lower its allowance in {ALLOWANCES.name}: {lower}"


def test_no_sentence_begins_with_of():
    count = sum(len(FRONTED.findall(text)) for text in PLACES.values())
    allowed = ALLOWED.get("sentences that begin with Of", {}).get("count", 0)
    assert count <= allowed, f"{count} sentences begin with 'Of ', {allowed} are allowed"


def test_a_page_of_bad_prose_is_seen():
    text = "Of the one of it, what it is of one. " * 40
    assert all(rate > BOUNDS[word] for word, rate in measure(text).items())
    assert FRONTED.search("Said. Of all")
    assert not FRONTED.search("Of course")


if __name__ == "__main__":  # writes the allowances anew
    wrong: dict[str, dict[str, float]] = {}
    for name, prose in PLACES.items():
        if over := {w: r for w, r in measure(prose).items() if r > BOUNDS[w]}:
            wrong[name] = over
    wrong["sentences that begin with Of"] = {"count": sum(len(FRONTED.findall(text)) for text in PLACES.values())}
    ALLOWANCES.parent.mkdir(exist_ok=True)
    ALLOWANCES.write_text(json.dumps(wrong, indent=1) + "\n")
