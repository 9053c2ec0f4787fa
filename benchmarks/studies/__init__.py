"""Studies beside the benchmarks: rows, judgement, tables and charts of each. The scripts in benchmarks/ record them."""
