"""tigon.fuse: replaces forwards in one model instance by Tigon's operators, and restores them."""
