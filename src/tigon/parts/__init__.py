"""What fuse can replace in a model, one file for each kind: how it is recognised, and the forward that replaces it."""
