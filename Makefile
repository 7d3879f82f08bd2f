# `make demo` trains the default experiment; `make test` runs the tests that together take about ten minutes on two
# cores, and `make test-slow` all others; `make site` builds the documentation in site/; `make release` builds a release and tests it. All of them set up .venv first.
# They need only make, Python 3.11 or newer (PYTHON=... chooses one) and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo
# A worker runs whole files, so that what the tests of a file share is computed once; conftest.py gives the order.
PYTEST = $(BIN)/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder

.PHONY: demo test test-slow lint types site release clean

demo: $(VENV)/.installed
	$(BIN)/praxis-lite train --exp=lm.StdlibLm --job_log_dir=$(RUN_DIR)
	@echo; echo "What it writes, twice, after the first four lines:"; echo
	$(BIN)/praxis-lite decode --exp=lm.StdlibLm --job_log_dir=$(RUN_DIR) --num_samples=2 --seed=2 \
	  --prompt="$$(printf 'class Reader:\n    def __init__(self, name):\n        self.name = name\n        self.')"

test: $(VENV)/.installed-dev
	$(PYTEST) -m 'not slow' tests

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "To read it with search: $(BIN)/python -m http.server --directory site"

release: $(VENV)/.installed-dev
	tools/release.sh

clean:
	rm -rf $(VENV) runs site dist build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "praxis_lite needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed
