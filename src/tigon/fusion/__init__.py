"""tigon.fuse: Tigon's operators in place of a model's own, in one instance, and out again."""
