"""The columns of benchmarks/compress.py in the documentation. Times of calls stay in the record: other programs ran."""

from __future__ import annotations

from tigon.bench import report
from tigon.bench.columns import number

report.COLUMNS["compress"] = {
    "model": lambda row: row["model"],
    "stored as": lambda row: row["method"] if row["status"] == "ok" else f"{row['method']} (failed)",
    "bits a weight": lambda row: number(row["bits"]),
    "held-out loss": lambda row: number(row["loss"], 5),
    "distance": lambda row: number(row["distance"]),
}
