"""Optional packages: each extra or group in pyproject.toml, and the packages that tests import from these."""

# fmt: off
EXTRAS = frozenset({
    "accelerate", "bitsandbytes", "cut_cross_entropy", "datasets", "deepspeed", "gguf", "httptools", "httpx",
    "hypothesis", "jinja2", "lightgbm", "liger_kernel", "lightning", "matplotlib", "mkdocs", "numpy", "optuna",
    "pandas", "peft", "polars", "prometheus_client", "pyarrow", "pydantic", "rich", "safetensors", "scipy",
    "sentence_transformers", "sklearn", "starlette", "tensorboard", "tokenizers", "transformers", "trl", "typer",
    "uvicorn", "uvloop", "yaml",
})
