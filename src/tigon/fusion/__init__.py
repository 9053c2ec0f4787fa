"""tigon.fuse: replaces a model's forwards by Tigon's operators, in one instance, and restores them again."""
