"""LiRank beside FuxiCTR's models and trees: quality, calibration and the time of a step."""
