"""Operators that only LiRank uses, one file each."""
