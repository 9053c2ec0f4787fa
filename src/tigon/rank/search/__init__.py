"""Search for the blocks of a LiRank: which graphs there are, which are tried, and the study that keeps them."""
