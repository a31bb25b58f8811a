# Two commands on a fresh machine: `make demo` shows the main job, `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test slow gpu lint format clean

demo: $(VENV)/.demo
	$(BIN)/perilune quickstart

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# Kernels of one process compile while another's run; each holds a few GB of the device.
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu --numprocesses 6 --timeout 600

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Perilune needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (set PYTHON=...)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train]'
	@touch $@

# The CPU build of torch has no triton; the tests run kernels in the interpreter of 3.6.0. xgrammar would bring any.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt torch
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || $(PIP) install --quiet 'triton==3.6.0'
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.demo
