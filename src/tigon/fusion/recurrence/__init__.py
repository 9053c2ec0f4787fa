"""Token mixers with a state: convolutions, delta rules and scans in models, also over packed documents and prefixes."""
