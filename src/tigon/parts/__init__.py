"""The kinds of modules that fuse replaces, a file each: how a kind is recognised, and its fused forward."""
