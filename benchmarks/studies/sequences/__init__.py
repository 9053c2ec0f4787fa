"""LiGR beside SASRec, RecTools and RecBole on next items."""
