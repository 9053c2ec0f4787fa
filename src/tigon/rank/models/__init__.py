"""Rankers: LiGR, LiRank and rankers by prompts."""
