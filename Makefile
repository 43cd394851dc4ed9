# Every target works alone on a fresh clone: it sets up .venv first, and a second run finds it done.
.PHONY: help setup report test lab bench lint lock
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# What a terminal shows while it waits; a log file stays short.
UV_FLAGS := $(if $(CI),--quiet --no-progress,--quiet)

help:
	@echo "make setup    set up $(VENV) (about 6 GB, most of it torch)"
	@echo "make report   run the notebooks on 4 MPI ranks, write reports/*.html"
	@echo "make test     run every test"
	@echo "make lab      open JupyterLab"
	@echo "make bench    print the performance tables"

setup: $(VENV)/.done
	@echo "$(VENV) is ready"

$(VENV)/.done: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) here. Cure: install Python 3.11 or newer, or: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "labkit needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1). Cure: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing. Cure: apt-get install python3-venv (or your system's package of that name)"; exit 1; }
	@echo "[1/4] making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] installing uv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "[3/4] installing $$(grep -cE '^[a-z0-9]' requirements.lock) packages, torch and Open MPI among them (about 6 GB: half a minute to several)"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install $(UV_FLAGS) --compile-bytecode --require-hashes -r requirements.lock
	@echo "[4/4] installing labkit"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install $(UV_FLAGS) --no-deps -e .
	@touch $@

report: setup
	@$(BIN)/labkit report notebooks/*.ipynb --out reports

# The tests within one process share the cores; those with ranks, which fill them, come one by one.
test: setup
	@status=0; \
	$(BIN)/python -m pytest tests/unit --numprocesses auto --dist loadfile || status=1; \
	$(BIN)/python -m pytest tests --ignore tests/unit || status=1; \
	exit $$status

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

lab: setup
	@$(BIN)/labkit notebook notebooks

bench: setup
	@$(BIN)/labkit bench

# After a change of pyproject.toml's dependencies.
lock: setup
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --extra test pyproject.toml -o requirements.lock
