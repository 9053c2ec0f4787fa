"""Rankers: LiGR, LiRank and prompt rankers."""
