SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A PostgreSQL of the system's, for the tests of the plain form; empty where there is none.
SYSTEM_PG = $(shell tests/system-postgres)

# What hangs on the rights of the queue's owner runs again with one who is no superuser, as is usual.
OWNED := 54_ 55_ 60_ 62_ 86_ isolation/late_fetch isolation/two_reapers isolation/zombie \
  isolation/extend_reap isolation/finish_reap

# Tests wait more than they compute: three at once, and who has none left takes some of another's. Those in unit/ and
# those marked client ask nothing of the server's version: once is enough. Soak is what computes for longer than some
# seconds, or storms that find more the longer they last: each has a short form here.
PYTEST := pytest -q -n 3 --dist worksteal

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(VENV)/.installed ## Make .venv with pgdefer and all its tools, versions pinned

$(VENV)/.installed: pyproject.toml requirements.lock extension/hatch_build.py
	@tests/install-tools python
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing the Python packages of requirements.lock into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/pip check > /dev/null
	@touch $@

.PHONY: build
build: ## Assemble extension/ into build/: the extension and pgdefer.sql
	@$(PYTHON) extension/build.py > /dev/null

.PHONY: freeze
freeze: ## Write the extension as it is released to extension/releases/, from where it never changes
	@$(PYTHON) extension/build.py --freeze

.PHONY: tools
tools: ## Install pgTAP, plpgsql_check and a PostgreSQL by apt, where apt is and they are missing
	@tests/install-tools postgres

.PHONY: demo
demo: venv build ## Run jobs over the files of Python's standard library, on an embedded server
	@$(BIN)/pgdefer demo

.PHONY: test
test: test-sql test-py ## Run all tests, on PostgreSQL 18 (extension) and the system's (plain SQL)

.PHONY: test-sql
test-sql: test-sql-embedded test-sql-system ## Run pgTAP and the isolation specs on both servers

.PHONY: test-py
test-py: test-py-embedded test-py-system ## Run pytest on both servers

.PHONY: test-sql-embedded test-py-embedded test-sql-system test-py-system
test-sql-embedded: venv build tools
	$(BIN)/python tests/sql/run
	$(BIN)/python tests/sql/run --owner pgdefer_owner $(OWNED)

test-py-embedded: venv build tools
	$(BIN)/$(PYTEST)
	PGDEFER_TEST_OWNER=pgdefer_owner $(BIN)/$(PYTEST) tests/py/races/test_reap.py

test-sql-system test-py-system: command = $(if $(findstring sql,$@),python tests/sql/run,$(PYTEST) --ignore tests/py/unit -m 'not soak and not client')
test-sql-system test-py-system: venv build tools
	@if [ -n "$(SYSTEM_PG)" ]; then \
	  echo "PGDEFER_PG_BIN=$(SYSTEM_PG) $(BIN)/$(command)"; \
	  PGDEFER_PG_BIN=$(SYSTEM_PG) $(BIN)/$(command); \
	else echo "SKIPPED: $@, as the system has no PostgreSQL 15, 16 or 17"; fi

.PHONY: test-matrix
test-matrix: venv build tools ## Run all tests on PostgreSQL 15, 16, 17, 18 and on Python 3.13 (QUICK=1: a part)
	$(BIN)/python tests/matrix $(if $(QUICK),--quick)

.PHONY: soak
soak: venv build ## Run the long tests
	$(BIN)/pytest -q -m soak -o faulthandler_timeout=1800

.PHONY: lint
lint: lint-style lint-types lint-sql ## Check style, types and SQL: ruff, mypy, plpgsql_check, pgspot, squawk

.PHONY: lint-style lint-types lint-sql
lint-style: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-types: venv
	$(BIN)/mypy

lint-sql: venv build tools
	$(BIN)/python tests/sql/lint
	$(BIN)/python docs/generate --check

.PHONY: docs
docs: venv build ## Write docs/reference.md from the comments in the catalog
	$(BIN)/python docs/generate

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
