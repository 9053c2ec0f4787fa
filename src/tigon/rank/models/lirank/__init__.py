"""LiRank: scores rows from their features, without an event sequence."""
