"""Token mixers with a state: short convolutions and delta rules in models, also over packed documents and prefixes."""
