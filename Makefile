SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PG_CONFIG ?= pg_config
VENV := .venv
BIN := $(VENV)/bin
# The system's PostgreSQL, for the tests of the plain form; empty if there is none.
SYSTEM_PG = $(shell tests/system-postgres)

# Tests that depend on the rights of the queue's owner run again with an owner who is no superuser, the usual case.
OWNED := base/era base/sensitive work/workers work/reap work/maintenance work/retention work/finish.fenced inspect/stats inspect/health

# Tests wait more than they compute, so three processes run them; one that is done takes over some of another's. Tests
# in unit/ and those marked client do not depend on the server's version, so they run once. Tests marked long take over
# five seconds of an idle machine; most have shorter ones beside them, and the others are pages of the docs. Only
# test-all runs them. Tests marked soak compute for longer still, or are storms that find more the longer they last; each
# has a short form that runs here.
PYTEST := pytest -q -n 3 --dist worksteal
# Let Python cache what it compiles, even where the environment forbids it: tests start hundreds of programs.
export PYTHONDONTWRITEBYTECODE :=
# A test that failed runs up to two times more, and is listed with its trace: only CI does that, for at most 12 runs in all.
AGAIN := --reruns 2 --reruns-delay 5 --max-suite-reruns 12 --rerun-show-tracebacks -raR

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(VENV)/.installed ## Create .venv with pgdefer and all its tools, versions pinned

$(VENV)/.installed: pyproject.toml requirements.lock extension/hatch_build.py
	@tests/install-tools python
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing the Python packages of requirements.lock into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/pip check > /dev/null
	@touch $@

.PHONY: all
all: build ## The same as build, which PGXN's client asks for before install

.PHONY: build
build: ## Assemble extension/ into build/: the extension and pgdefer.sql
	@$(PYTHON) extension/build.py > /dev/null

.PHONY: freeze
freeze: ## Write this release of the extension to extension/releases/, where it never changes again
	@$(PYTHON) extension/build.py --freeze

.PHONY: tools
tools: ## Install what tests need besides Python packages, with apt and npm if present
	@tests/install-tools postgres
	@tests/install-tools node
	@tests/install-tools browser

.PHONY: demo
demo: venv build ## Run jobs over the files of Python's standard library, on an embedded server
	@$(BIN)/pgdefer demo

.PHONY: test
test: test-sql test-py ## Run the tests on PostgreSQL 18: pgTAP, the isolation specs and pytest

.PHONY: test-all
test-all: test-sql test-sql-owner test-py-all test-django test-sql-system test-py-system ## Run also the long tests, and all on the system's PostgreSQL (CI)

.PHONY: test-sql test-sql-owner test-py test-py-all test-django test-sql-system test-py-system
test-sql: venv build tools
	$(BIN)/python tests/sql/run --jobs 2 --servers 4

test-sql-owner: venv build tools
	$(BIN)/python tests/sql/run --owner pgdefer_owner $(OWNED)
	PGDEFER_TEST_OWNER=pgdefer_owner $(BIN)/$(PYTEST) tests/py/races/test_reap.py

test-py: venv build tools
	$(BIN)/$(PYTEST) -m 'not soak and not long'

test-py-all: venv build tools
	$(BIN)/$(PYTEST) $(AGAIN)

# Django 6 needs Python 3.12.
test-django: venv build tools
	$(BIN)/python tests/matrix --django

test-sql-system test-py-system: command = $(if $(findstring sql,$@),$(BIN)/python tests/sql/run --jobs 2 --servers 4,$(BIN)/$(PYTEST) $(AGAIN) tests/py --ignore tests/py/unit -m 'not soak and not client')
test-sql-system test-py-system: venv build tools
	@if [ -n "$(SYSTEM_PG)" ]; then \
	  echo "PGDEFER_PG_BIN=$(SYSTEM_PG) $(command)"; \
	  PGDEFER_PG_BIN=$(SYSTEM_PG) $(command); \
	else echo "SKIPPED: $@, as the system has no PostgreSQL 15, 16 or 17"; fi

.PHONY: test-matrix
test-matrix: venv build tools ## Run all tests on PostgreSQL 15, 16, 17, 18 and on Python 3.13 (QUICK=1: a part)
	$(BIN)/python tests/matrix $(if $(QUICK),--quick)

.PHONY: test-oldest
test-oldest: venv build tools ## Run tests with the lowest versions of other packages that pyproject.toml allows
	$(BIN)/python tests/matrix --oldest

.PHONY: soak
soak: venv build ## Run the long tests
	$(BIN)/pytest -q -m soak -o faulthandler_timeout=3600

.PHONY: scale
scale: venv build ## Run the tests of Citus, where it is installed in the system's PostgreSQL
	$(BIN)/pytest -q -rs -s tests/scale

.PHONY: lint
lint: lint-style lint-types lint-sql lint-docs ## Check style, types and SQL: ruff, mypy, plpgsql_check, pgspot, squawk, hadolint, proselint, aspell

.PHONY: lint-style lint-types lint-sql lint-docs
lint-style: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python python/async_to_sync.py --check
	$(BIN)/hadolint deploy/Dockerfile

lint-types: venv
	$(BIN)/mypy

lint-sql: venv build tools
	$(BIN)/python tests/sql/lint
	$(BIN)/python tests/mutate --fit
	$(BIN)/python docs/generate --check

lint-docs: venv tools
	$(BIN)/python docs/lint

.PHONY: docs
docs: venv build ## Write the generated pages: SQL, Python, the command line
	$(BIN)/python docs/generate

.PHONY: docs-site
docs-site: venv ## Build the documentation as a site, in build/site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

.PHONY: generate
generate: venv ## Write the synchronous twins from their asynchronous sources
	$(BIN)/python python/async_to_sync.py

.PHONY: format
format: venv ## Format the Python code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench
bench: venv build ## Measure what the documentation claims, and print figures and ratios
	@for script in bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

.PHONY: install
install: build ## Copy the extension into the server of PG_CONFIG (DESTDIR: into a folder instead of /)
	@install -d "$(DESTDIR)$$($(PG_CONFIG) --sharedir)/extension"
	@install -m 644 build/extension/* "$(DESTDIR)$$($(PG_CONFIG) --sharedir)/extension"

# The tools of make dist have an environment of their own: they need sixty packages, and nothing else needs them.
.tools/release/.installed: release.lock
	@$(PYTHON) -m venv .tools/release
	@echo "Installing the Python packages of release.lock into .tools/release"
	@.tools/release/bin/pip install --quiet --disable-pip-version-check --require-hashes -r release.lock
	@touch $@

DIST ?= dist

.PHONY: dist
dist: venv .tools/release/.installed ## Build the wheel, the sdist and the SBOM in dist/, and check them
	@rm -rf "$(DIST)"
	$(BIN)/python -m hatchling build -d "$(DIST)"
	.tools/release/bin/twine check --strict "$(DIST)"/*
	.tools/release/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
	  -o "$(DIST)/$$(basename "$(DIST)"/*.whl -py3-none-any.whl).cdx.json" requirements.lock

.PHONY: clean
clean: ## Remove everything built or cached, and .venv
	rm -rf build dist $(VENV) .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
