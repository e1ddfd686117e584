SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A PostgreSQL of the system's, for the tests of the plain form; empty where there is none.
SYSTEM_PG = $(shell tests/system-postgres)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(VENV)/.installed ## Make .venv with pgdefer and all its tools, versions pinned

$(VENV)/.installed: pyproject.toml requirements.lock extension/hatch_build.py
	@tests/install-tools python
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing the Python packages of requirements.lock into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock hatchling editables
	@$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock \
	  --no-build-isolation -e '.[all,test,lint]'
	@touch $@

.PHONY: build
build: ## Assemble extension/ into build/: the extension and pgdefer.sql
	@$(PYTHON) extension/build.py > /dev/null

.PHONY: tools
tools: ## Install pgTAP, plpgsql_check and a PostgreSQL by apt, where apt is and they are missing
	@tests/install-tools postgres

.PHONY: demo
demo: venv build ## Run jobs over the files of Python's standard library, on an embedded server
	@$(BIN)/pgdefer demo

.PHONY: test
test: test-sql test-py ## Run all tests, on PostgreSQL 18 (extension) and the system's (plain SQL)

.PHONY: test-sql
test-sql: venv build tools ## Run pgTAP and the isolation specs on both servers
	$(BIN)/python tests/sql/run
	@if [ -n "$(SYSTEM_PG)" ]; then \
	  PGDEFER_PG_BIN="$(SYSTEM_PG)" $(BIN)/python tests/sql/run; \
	else echo "SKIPPED: tests of the plain form in SQL, as the system has no PostgreSQL 15 to 17"; fi

.PHONY: test-py
test-py: venv build tools ## Run pytest on both servers
	$(BIN)/pytest -q
	@if [ -n "$(SYSTEM_PG)" ]; then \
	  PGDEFER_PG_BIN="$(SYSTEM_PG)" $(BIN)/pytest -q; \
	else echo "SKIPPED: pytest on the plain form, as the system has no PostgreSQL 15 to 17"; fi

.PHONY: test-matrix
test-matrix: venv build tools ## Run all tests on PostgreSQL 15, 16, 17, 18 and on Python 3.13
	$(BIN)/python tests/matrix

.PHONY: soak
soak: venv build ## Run the long tests
	$(BIN)/pytest -q -m soak

.PHONY: lint
lint: venv build tools ## Check style, types and SQL: ruff, mypy, plpgsql_check, pgspot, squawk
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tests/sql/lint

.PHONY: format
format: venv ## Format the Python code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench
bench: venv build ## Measure what the documentation claims; prints figures and ratios
	@for script in bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

.PHONY: dist
dist: venv ## Make the wheel and the sdist in dist/
	$(BIN)/python -m hatchling build

.PHONY: clean
clean: ## Remove what was built or cached; .venv too
	rm -rf build dist $(VENV) .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
