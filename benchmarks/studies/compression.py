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

report.COLUMNS["compress-sst2"] = {
    "model": lambda row: row["model"],
    "stored as": lambda row: row["method"],
    "file, MB": lambda row: number(row["mb"]),
    "of the whole": lambda row: f"{row['share']:.1%}",
    "accuracy": lambda row: f"{row['accuracy']:.1f} %",
    "refitted": lambda row: f"{row['refitted']:.1f} %",
}
