"""Search jobs by a vector with hard filters, from a parquet file to a table of hits, and write while the index is open.

    python examples/retrieve_filters.py

The jobs are made up. Put your own table and vectors in the place of `make_jobs`.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tigon import retrieve
from tigon.retrieve import col

DIM = 64


def make_jobs(path: Path, count: int = 20_000) -> None:
    """A parquet file of jobs: an id, a vector, and what jobs are filtered by."""
    rng = np.random.default_rng(0)
    skills = np.array(["python", "rust", "sql", "cuda", "sales", "design"])
    vectors = rng.normal(size=(count, DIM)).astype(np.float32)
    pq.write_table(
        pa.table(
            {
                "job_id": [f"job-{i}" for i in range(count)],
                "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), DIM),
                "country": rng.choice(["us", "ca", "de", "fr"], count),
                "skills": [skills[rng.random(6) < 0.3].tolist() for _ in range(count)],
                "salary": np.where(rng.random(count) < 0.2, np.nan, rng.uniform(40_000, 200_000, count).round(-2)),
                "posted": np.datetime64("2026-01-01", "s") + rng.integers(0, 90 * 86_400, count),
            }
        ),
        path,
    )


def main(folder: Path) -> None:
    make_jobs(folder / "jobs.parquet")
    jobs = pq.read_table(folder / "jobs.parquet")
    vectors = torch.from_numpy(jobs["vector"].combine_chunks().flatten().to_numpy().reshape(-1, DIM).copy())

    schema = retrieve.Schema(
        country=retrieve.Category(300),
        skills=retrieve.Tags(30),
        salary=retrieve.Number(0, 1_000_000, step=100),
        posted=retrieve.Timestamp("h"),
    )
    print(retrieve.plan_memory(2 * len(jobs), DIM, metric="cosine", schema=schema, id_length=10))
    index = retrieve.Index(DIM, 2 * len(jobs), metric="cosine", schema=schema)
    index.upsert(jobs["job_id"], vectors, jobs.select(list(schema)))
    index.save(folder / "jobs.index")

    # With a journal: what is written from here on survives a crash.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    index = retrieve.Index.open(folder / "jobs.index", device=device)
    where = (
        col("country").is_in(["us", "ca"])
        & col("skills").has_all(["python", "cuda"])
        & ~col("skills").has("sales")
        & ((col("salary") >= 100_000) | col("salary").is_null())
        & (col("posted") >= "2026-02-01")
    )
    print(index.explain(where, k=5))

    query = torch.nn.functional.normalize(torch.randn(DIM, generator=torch.Generator().manual_seed(0)), dim=0)
    hits = index.search(query, k=5, where=where)
    print(hits.take(jobs.drop_columns(["vector"]), id="job_id").to_pandas().to_string())

    # A new job is found from the moment it is written.
    job = {"country": ["us"], "skills": [["python", "cuda"]], "salary": [150_000], "posted": ["2026-03-31T12:00"]}
    index.upsert(["job-new"], query[None], job)
    hits = index.search(query, k=2, where=where)
    print("best now:", hits.ids[0].tolist(), [round(score, 3) for score in hits.scores[0].tolist()])
    index.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
