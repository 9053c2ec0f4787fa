"""Files whose tests need a package that is not installed are left out."""

from importlib.util import find_spec

NEEDS = {
    "test_retrieve_schema.py": "hypothesis",
    "test_retrieve_where.py": "hypothesis",
    "test_retrieve_updates.py": "hypothesis",
    "test_retrieve_storage.py": "safetensors",
}
collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]
