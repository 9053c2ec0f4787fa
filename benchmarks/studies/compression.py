"""The columns of benchmarks/compress.py, compress_sst2.py and compress_latency.py in the documentation."""

from __future__ import annotations

from harness import report
from harness.columns import number

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

report.COLUMNS["compress-latency"] = {
    "model": lambda row: row["model"],
    "stored as": lambda row: row["method"],
    "call": lambda row: f"{row['call']}, {row['threads']} thread{'s' * (row['threads'] > 1)}",
    "median": lambda row: f"{row['ms']:.1f} ms",
    "quartiles": lambda row: "{:.1f} to {:.1f}".format(*row["quartiles"]),
    "fastest": lambda row: f"{row['least']:.1f} ms",
    "speed": lambda row: f"{row['speed']:.2f} ×",
}
