"""LiRank: a ranker of rows by their features, without a sequence of events."""
