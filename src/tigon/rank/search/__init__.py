"""Search for LiRank block graphs: the search space, the sampler, and the study."""
