# Every target does its own set-up: each one that needs packages depends on the stamp of .venv.
# Written for GNU make 3.81 (macOS) and later, and for any POSIX shell.

VENV := .venv
PY   := PYTHONPATH= $(VENV)/bin/python

# The stamp's name holds a checksum of the pins, of the project's declaration (not of the tools'
# settings, which need no new packages) and of this folder (a .venv that moved is broken), so a
# change to any of them asks for a stamp that is not there. It is written last: a .venv without
# one is half made, and is made anew.
PINS  := $(shell { pwd; cat constraints.txt; \
                   awk '/^\[/ { on = /^\[(build-system|project)/ } on' pyproject.toml; } \
                 | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.made-$(PINS)

# make setup PYTHON=/some/python3.12 takes that one; the first of these that suits, otherwise.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3 python)
SUITS   := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# make test-here runs on what the machine has.
HERE := $(if $(PYTHON),$(PYTHON),python3)
# make test ARGS="-k ddp -x" hands options to pytest, and likewise for demo, check and lab.
ARGS ?=
# So many test files run at the same time; make test WORKERS=0 runs all in one process, as --pdb needs.
WORKERS ?= 2
PYTEST  := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo lab notebooks test check test-here cluster gpu lint types format hooks clean

help: ## List the targets.
	@awk 'BEGIN { FS = ":[^#]*## " } /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Build .venv with the pinned packages (made once, made anew when the pins change).
	@echo "labkit: $(VENV) is ready"

demo: $(STAMP) ## Train a small GPT with every strategy on four real ranks and compare.
	PYTHONPATH= $(VENV)/bin/labkit compare --all $(ARGS)

lab: $(STAMP) ## Open the labs in JupyterLab.
	$(PY) -m jupyterlab notebooks $(ARGS)

notebooks: $(STAMP) ## Build the labs' editions from notebooks/src (ARGS="00", ARGS=--all).
	$(PY) notebooks/src/editions.py $(ARGS)

test: $(STAMP) ## Run the whole test suite (ARGS="..." goes to pytest).
	$(PY) $(PYTEST) $(ARGS)

check: $(STAMP) ## Run the fast part of the test suite, in under five minutes.
	$(PY) $(PYTEST) -m "not slow" $(ARGS)

test-here: ## Run the whole suite on the Python and torch this machine has, installing nothing (PYTHON=...).
	@$(HERE) -c 'import importlib.util as u, sys; \
	need = "torch numpy cloudpickle matplotlib psutil rich typer pytest".split(); \
	gone = [name for name in need if u.find_spec(name) is None]; \
	sys.exit(f"labkit: {sys.executable} has no {chr(44).join(gone)}; add them to it, or run make test" if gone else 0)'
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(HERE) -m pytest $(ARGS)

cluster: $(STAMP) ## Run the tests on Slurm, mpirun and two hosts that this machine plays (as root).
	LABKIT_CLUSTER=1 $(PY) -m pytest -m cluster $(ARGS)

gpu: ## Check and measure labkit on this machine's GPUs, installing nothing (PART=tests, labs or bench).
	$(HERE) tests/benchmarks/gpu.py $(PART) $(ARGS)

lint: $(STAMP) ## Check style and format with ruff, notebooks included.
	$(PY) -m ruff check
	$(PY) -m ruff format --check

# The labs' folders begin with a digit: mypy takes them as modules, by name, not as files.
MODULES = $(filter-out %/lab.py %/wrong_answers.py,$(wildcard notebooks/src/*/*.py))
types: $(STAMP) ## Check the types of labkit/ and of the labs' checks with mypy.
	$(PY) -m mypy
	MYPYPATH=notebooks/src $(PY) -m mypy $(foreach file,$(MODULES),-m $(subst /,.,$(file:notebooks/src/%.py=%)))

format: $(STAMP) ## Put every file into the house format.
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

hooks: $(STAMP) ## Have git check style and types before each commit.
	$(PY) -m pre_commit install

clean: ## Remove .venv, caches and build products (recorded runs stay).
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find labkit tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A .venv whose Python has gone (an upgrade of the system's) counts as not made.
ifneq ($(shell test -x $(VENV)/bin/python && echo there),there)
.PHONY: $(STAMP)
endif

$(STAMP):
	@set -e; \
	found=; bare=; \
	for candidate in $(PYTHONS); do \
	    "$$candidate" -c '$(SUITS)' >/dev/null 2>&1 || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	    bare=$$candidate; \
	done; \
	if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	    echo "labkit: $$bare cannot make virtual environments; install its venv package" \
	         "(on Debian and Ubuntu: apt-get install $$bare-venv)" >&2; exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
	    echo "labkit needs Python 3.11, 3.12 or 3.13 and tried: $(PYTHONS)." >&2; \
	    echo "Install one of them, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if [ ! -e $(VENV) ]; then echo "labkit: making $(VENV) with $$found; the first time takes some minutes"; \
	elif ls $(VENV)/.made-* >/dev/null 2>&1; then echo "labkit: the pins or the folder changed, making $(VENV) anew with $$found"; \
	else echo "labkit: $(VENV) is only half made, making it anew with $$found"; fi; \
	rm -rf $(VENV); \
	"$$found" -m venv $(VENV); \
	PYTHONPATH= $(VENV)/bin/python -m pip install --disable-pip-version-check --no-input $(if $(CI),--quiet) \
	    -c constraints.txt -e '.[lab,dev,wild]'; \
	touch $(STAMP)
