"""Files whose tests need packages that are not installed are left out."""

from importlib.util import find_spec

NEEDS = {
    "test_retrieve_schema.py": "hypothesis",
    "test_retrieve_where.py": "hypothesis",
    "test_retrieve_updates.py": "hypothesis",
    "test_retrieve_storage.py": "safetensors",
    "test_retrieve_serve.py": (server := "fastapi uvicorn httptools prometheus_client httpx safetensors"),
    "test_retrieve_fronts.py": server,
}
collect_ignore = [file for file, packages in NEEDS.items() if None in map(find_spec, packages.split())]
