"""LiRank-only operators, one per file."""
