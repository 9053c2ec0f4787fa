"""G2R beside DGI and GRACE on citation graphs."""
