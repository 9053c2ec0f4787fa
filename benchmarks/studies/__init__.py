"""Studies that were run, with their records in benchmarks/results: `python -m studies.NAME`, from benchmarks/."""
