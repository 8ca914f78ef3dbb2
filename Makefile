# Everything lives in .venv and .venv-oldest; pip uses whatever index it is configured with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With the oldest supported transformers, and an embedded model that it has converted itself.
OLDEST := .venv-oldest
# What depends on how transformers makes tokenizers and models. tests/test_docs.py is about the classes of one release.
OLDEST_TESTS := tests/models tests/loading tests/engine tests/serve tests/transformers_hook tests/bench tests/test_cli.py \
  tests/test_generate.py tests/test_parity.py tests/test_stock.py tests/test_structured_output.py
# Python compiles a module when it is first imported. To compile all of them takes half a minute, and most are never used.
PIP_INSTALL := -m pip --disable-pip-version-check install -q --no-compile
# Each process that a test starts would otherwise compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick-tests test-all test-oldest test-gpu browser lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## fetch the embedded model and compare lookahead with plain decoding and transformers
	$(BIN)/lookahead pull
	$(BIN)/lookahead generate -p "Write a Python class for a stack with push, pop, peek and is_empty." \
	  --max-tokens 128 --compare-stock
	@echo "Code repeats itself, so guesses pay. Expect less on chat and prose, and more on copying: see docs/cpu.md."
	@echo "To see it in a browser: $(BIN)/lookahead serve, then open http://127.0.0.1:8000/"

test: $(VENV)/.installed-dev browser ## lint, and run the tests but the slow sweeps
	@$(MAKE) --no-print-directory -j2 lint quick-tests

quick-tests: # mypy uses one core: lint runs beside the tests
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow" --hypothesis-profile=quick

test-all: lint browser test-oldest ## lint, test-oldest, then run all tests: every model class, kernels at every size
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-oldest: $(OLDEST)/.installed-dev ## loading, engine, server and hook with the oldest transformers; no slow sweeps
	LOOKAHEAD_CACHE=$(CURDIR)/$(OLDEST)/cache $(OLDEST)/bin/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow" \
	  --hypothesis-profile=quick $(OLDEST_TESTS)

# Without .venv: a machine with a GPU may have its own torch and no package index.
GPU_PYTHON ?= python3
test-gpu: ## on a GPU: tests, identity, soak, figures against the baseline; ARGS="--only soak --model FILE"
	@$(GPU_PYTHON) -c "import torch, transformers" 2>/dev/null \
	  || { echo "test-gpu: $(GPU_PYTHON) has no torch or no transformers; set GPU_PYTHON=/path/to/python3" >&2; exit 2; }
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_check.py $(ARGS)

browser: ## install Chromium for the tests of the web page, if there is none and this is root on Debian
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium for the tests of the web page"; \
	    { timeout 60 apt-get -qq update && DEBIAN_FRONTEND=noninteractive timeout 240 \
	      apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1; \
	  fi; \
	  command -v chromium >/dev/null || echo "there is no Chromium: the tests of the web page are skipped"

lint: $(VENV)/.installed-dev ## ruff, mypy, import-linter, figures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/figures.py --check

format: $(VENV)/.installed-dev ## sort imports and reformat
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, .venv-oldest, caches and build output
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src -name '*.egg-info' -prune -exec rm -rf {} +
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps: an install is repeated only when what it was made from has changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[cpu,serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(OLDEST)/.installed-dev: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints-oldest.txt -e '.[dev]'
	@touch $@

$(BIN)/python $(OLDEST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(@:/bin/python=) \
	  || { rm -rf $(@:/bin/python=); echo "no venv module: on Debian, apt install python3-venv" >&2; exit 1; }
