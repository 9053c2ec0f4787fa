"""tigon.fuse: puts Tigon's operators in place of a model's own, in one instance, and takes them out again."""
