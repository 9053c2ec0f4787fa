"""The examples of retrieval run as a user runs them."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_from_a_parquet_file_to_filtered_hits(example):
    for package in ("pyarrow", "pandas", "safetensors"):
        pytest.importorskip(package)
    said = example(EXAMPLES / "retrieve_filters.py")
    assert "skills has all of 'python', 'cuda'" in said
    hits = re.findall(r"^\d +0 +(\d) .*job-\d+ +(us|ca) +\[(.*?)\] +(\S+) +(\S+)", said, re.MULTILINE)
    assert [rank for rank, *_ in hits] == list("01234")
    for _, _, skills, salary, posted in hits:
        assert {"python", "cuda"} <= set(skills.split(", "))
        assert "sales" not in skills
        assert salary == "NaN" or float(salary) >= 100_000
        assert posted >= "2026-02-01"
    assert re.search(r"best now: \['job-new', 'job-\d+'\] \[1.0, 0\.\d+\]", said)


def test_towers_that_learn_what_users_like(example):
    said = example(EXAMPLES / "retrieve_two_towers.py")
    before, after = (float(x) for x in re.findall(r"recall@20 of later pairs: (0\.\d+)", said))
    assert before < 0.1  # 20 of 400 items, drawn by chance, hold a twentieth
    assert after > 0.4  # 20 drawn of the 33 of a user's kind that are left hold 0.6
    (share,) = re.findall(r"of their kind: (\d+) of 50", said)
    assert int(share) >= 45


def test_prompts_of_passages_under_filters(example):
    said = example(EXAMPLES / "retrieve_rag.py")
    prompts = re.findall(r"name those that you used\.\n\n((?:\[kb-.*\n)+)\nQuestion: (.*)\nAnswer: …", said)
    found = [re.findall(r"^\[(kb-\d+)\] \w", passages, re.MULTILINE) for passages, _ in prompts]
    assert [question for _, question in prompts][:2] == ["How do I reset the router?", "How do I reset it?"]
    router, camera, anything, updated = found
    assert router[0] == "kb-1"
    assert set(router) <= {"kb-1", "kb-2", "kb-6"}
    assert camera[0] == "kb-5"
    assert set(camera) <= {"kb-4", "kb-5", "kb-7"}
    assert anything[0] == "kb-10"
    assert updated[0] == "kb-11"
    assert "kb-1" not in updated
    assert all(len(names) == 2 and "kb-3" not in names for names in found)  # kb-3 is internal


def test_links_find_the_planted_edges_and_explain_hits(example):
    pytest.importorskip("pyarrow")
    said = example(EXAMPLES / "retrieve_links.py")
    learned = re.findall(r"^  (\w+)=(\w+) → (\w+)=(\w+), \+[\d.]+$", said, re.MULTILINE)
    assert set(learned) >= {
        ("occupation", "programmer", "genres", "scifi"), ("occupation", "doctor", "genres", "drama"),
        ("occupation", "student", "era", "1990s"),
    }  # fmt: skip
    shares = dict(re.findall(r"^(vectors alone|with links|links alone): (\d+) %", said, re.MULTILINE))
    assert int(shares["with links"]) > 1.5 * int(shares["vectors alone"])
    parts = re.findall(r"^  film-\d+ +(\S+) = (\S+) of vectors(.*)$", said, re.MULTILINE)
    assert len(parts) == 3
    for score, vectors, rest in parts:
        links = [float(number) for number in re.findall(r", ([+-][\d.]+)", rest)]
        assert float(vectors) + sum(links) == pytest.approx(float(score), abs=0.02)
    assert "scifi" in "".join(rest for *_, rest in parts)
