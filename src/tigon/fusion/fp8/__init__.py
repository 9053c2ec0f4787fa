"""FP8 layers under fuse: the options, norms whose results are e4m3 rows, and products on them."""
