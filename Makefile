# Every target runs in .venv, which the first of them makes from the versions pinned in constraints.txt.
#
#   make demo       train a small Llama twice, plain and fused, and print the difference
#   make test       the whole suite on the CPU: torch reference, interpreted kernels, kernels compiled ahead of time
#   make lint       ruff, ruff format, mypy
#   make sweep      fuse every class of transformers that has a language head, into benchmarks/families
#   make converge   train eight families plain and fused, 300 steps; minutes on a GPU, hours on two cores
#   make docs       the documentation, into site/
#   make package    wheel and source distribution, into dist/, tried in a fresh environment
#   make gpu-test   the same suite on a CUDA device
#   make gpu-test-distributed   the tests of several processes, a GPU for each; larger worlds than the machine are skipped
#   make bench      benchmarks on a CUDA device, into benchmarks/results
#   make clean      remove .venv and everything that was built
#
#   make PYTHON=python3.12 …   build .venv with that interpreter
#   make PY=python3 …          use an interpreter that has everything installed, and no .venv
#   make PYTEST_ARGS="-k rms"  what pytest gets besides

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint sweep converge docs package gpu-test gpu-test-distributed bench clean

VENV := .venv
STAMP := $(VENV)/.installed
# transformers and half of the pinned set need Python 3.11; tigon itself runs on 3.10.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)) python3)
PYTEST_ARGS ?=
WORKERS ?= 2

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(STAMP)
endif
# src first, so that a foreign interpreter (PY=…) needs no installed tigon.
RUN := PYTHONPATH=src:benchmarks $(PY)

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

venv: $(STAMP)

# The stamp is written last: an interrupted installation is taken up again by the next make.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"make: the pinned versions need Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}. Name another one: make PYTHON=python3.12 …")'
	@rm -f $@
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing the versions of constraints.txt into $(VENV); a few minutes.'
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt pip setuptools
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[train,embed,export,docs,retrieve,rank,search,graph,serve]' --group dev --group bench
	@touch $@

demo: $(READY)
	$(RUN) -m tigon demo

# One thread per worker: the suite is bound by Python and by the interpreter, not by matrix products. With bytecode, which
# some images switch off: each process that a test starts would compile what it imports of tigon anew, a second or so.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --timeout=600 --durations=10 $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy -n $(WORKERS)

# One class after the other, each in a process that may die; SWEEP_ARGS="--only LlamaForCausalLM", "--shard 1/4".
sweep: $(READY)
	$(RUN) benchmarks/families/sweep.py $(or $(SWEEP_ARGS),--json benchmarks/families)

# Written after every row; begun again, it goes on. CONVERGE_ARGS="--families llama --dtype fp32", "--device cpu".
converge: $(READY)
	HF_HUB_OFFLINE=1 $(RUN) benchmarks/converge.py --output benchmarks/results --jobs $(WORKERS) $(CONVERGE_ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# Without isolation: the builder is among the pinned versions.
package: $(READY)
	rm -rf dist
	$(PY) -m hatchling build -d dist
	$(RUN) -m pytest tests/test_package.py $(PYTEST_ARGS)

gpu-test: $(READY)
	@$(RUN) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu-test: torch sees no CUDA device here. On a CPU: make test.")'
	HF_HUB_OFFLINE=1 $(RUN) -m pytest --durations=10 $(PYTEST_ARGS)

gpu-test-distributed: $(READY)
	@$(RUN) -c 'import sys, torch; torch.cuda.device_count() > 1 or sys.exit("make gpu-test-distributed: torch sees fewer than two CUDA devices here.")'
	TIGON_TEST_WORLD=cuda TIGON_TEST_RECORD=$(or $(RECORD),build/composition.json) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) -m pytest --durations=10 tests/distributed $(PYTEST_ARGS)

bench: $(READY)
	@$(RUN) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make bench: torch sees no CUDA device here.")'
	$(RUN) benchmarks/run.py --output benchmarks/results

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
