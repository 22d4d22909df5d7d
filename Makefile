# Two commands do everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= 2.13.0
# The first interpreter that is new enough; override with `make PYTHON=… setup`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
IMPORT_TESTS := tests/test_imports.py tests/test_exports.py tests/test_errors.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench docs clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup: $(STAMP)  ## create the virtual environment and install Kedge with everything for development

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Kedge needs Python >= 3.11; name one with make PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# Without a GPU, torch is asked for by its own name and version, so that a CPU build which pip can find wins.
	@command -v nvidia-smi >/dev/null 2>&1 || { echo "installing torch $(TORCH) (no GPU found)"; $(PIP) install torch==$(TORCH); }
	@echo "installing kedge[dev,plot]"
	@$(PIP) install -e '.[dev,plot]'
	@touch $@

demo: setup  ## run the main job: five agents, dense and translated side by side
	$(BIN)/kedge demo $(ARGS)

test: setup  ## run all tests
	$(BIN)/python -m pytest -q $(ARGS)

check: setup  ## lint, formatting, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(IMPORT_TESTS)

format: setup  ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## run the benchmark of the time to first token
	$(BIN)/kedge bench ttft $(ARGS)

docs: setup  ## build the documentation site into build/site
	@$(PIP) install -e '.[docs]'
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/mkdocs build --strict

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
