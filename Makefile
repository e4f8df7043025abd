# Needs make and Python 3.11 or newer; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
JOBS ?= 3
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

.PHONY: help demo page test browser campaign lint bench docs wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  PIP_FLAGS=  JOBS=$(JOBS) (processes of the tests)  ARGS= (passed on to the command)"

demo: $(VENV)/.installed  ## install, then find translations with the embedded model
	$(BIN)/calque demo $(ARGS)

page: $(VENV)/.installed-page  ## install, then open the page with the embedded model
	$(BIN)/calque serve $(ARGS)

test: $(VENV)/.installed-dev  ## install, then run the tests, except those in a browser
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --ignore=tests/browser $(ARGS)

browser: $(VENV)/.installed-dev  ## test the page in Chromium, which must be installed
	$(BIN)/python -m pytest -n 0 tests/browser $(ARGS)

campaign: $(VENV)/.installed-dev  ## damage inputs, kill and interrupt runs, fill disks (an hour)
	$(BIN)/python -m tests.campaign $(ARGS)

lint: $(VENV)/.installed-dev  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## measure speed and memory
	@set -e; for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python $$script $(ARGS); done

docs: $(VENV)/.installed-dev  ## build the site into site/
	$(BIN)/mkdocs build --strict --site-dir site

wheel: $(VENV)/.installed-dev  ## build the source archive, and from it the wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

clean:  ## remove what building and testing left, but not $(VENV)
	rm -rf site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The target is pip, not python: where ensurepip is missing, a half-made environment has only python.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Calque needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>/dev/null || echo missing). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module (python3-venv on Debian)." >&2; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-page: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[align,plots,serve]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-page $@
