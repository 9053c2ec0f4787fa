"""FP8 training products: rows, columns and weights in e4m3, and linear layers on them."""
