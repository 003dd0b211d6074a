# Everything runs from .venv, which `make setup` builds and every other target brings up to date first.
PY := .venv/bin/python
UV ?= .venv/bin/uv
# Files that lint and format look at; `make test` and `make test-large` run TESTS with PYTEST_ARGS.
CODE := $(wildcard train.py r3 configs tests tools benchmarks examples docs)
TESTS ?= tests
# Three files of tests at once on two cores, because many tests wait. In the order of their names:
# the short ones of tests/unit are last, so that all processes end at about the same time.
PYTEST_ARGS ?= --durations=40 --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Ranks and tests share few cores; spinning OpenMP threads would slow each other down several times.
test test-large test-all test-matrix: export OMP_NUM_THREADS := 1

# Many container images set it: each process would then compile R3 again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo compare test test-large test-all test-matrix lint fmt docs lock resolve signatures gpu-bundle clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { line = sprintf("  make %-12s", $$1); n = split($$2, word, " "); \
	  for (i = 1; i <= n; i++) { \
	    if (length(line word[i]) > 79) { print line; line = sprintf("%19s", "") } line = line " " word[i] } \
	  print line }' $(MAKEFILE_LIST)

setup: ## create or refresh .venv with the CPU stack (a minute and a half; at once when nothing changed)
	@tools/setup_env.sh

# PYTHON is the interpreter that .venv is made with; launch/local.sh would run with it.
demo: setup ## train the embedded model on this CPU
	@PYTHON= launch/local.sh tiny
	@echo "next       $(PY) -m r3.show runs/tiny      read samples"
	@echo "           $(PY) -m r3.report runs/tiny    charts, report.html"
	@echo "           make compare                         the same run without replay"

compare: demo ## train the demo once more without replay; both runs on one page, runs/compare.html
	@PYTHON= launch/local.sh tiny --replay.mode off --log.dir runs/tiny-off
	$(PY) -m r3.report runs/tiny runs/tiny-off -o runs/compare.html

# For tests alone, and beside the packages: vLLM's CPU build takes another path where it can import Triton.
TRITON := .venv/triton/requirements.txt
$(TRITON): requirements/triton.txt | setup
	rm -rf $(@D)
	$(PY) -m pip install --disable-pip-version-check -qq --no-deps --only-binary :all: \
	  --target $(@D) --requirement $<
	mkdir -p $(@D) # pip makes none where there is no wheel
	cp $< $@

test: lint $(TRITON) ## lint, types, the tests that are not marked large (11 minutes on two cores)
	$(PY) -m pytest -m "not gpu and not large and not matrix" $(PYTEST_ARGS) $(TESTS)

test-large: $(TRITON) ## what `make test` leaves out: Slurm, two nodes, kills, the pages' commands, sweeps
	$(PY) -m pytest -m "large and not gpu and not matrix" $(PYTEST_ARGS) $(TESTS)

# In one run: both parts would import, start and train the same things.
test-all: lint $(TRITON) ## every test that needs no GPU
	$(PY) -m pytest -m "not gpu and not matrix" $(PYTEST_ARGS) $(TESTS)

# All rows of these columns; CELLS="lora tp2" runs others. The results are those of docs/models.md.
CELLS ?= rl resume export sft
MATRIX_ARGS ?= --numprocesses 2 --dist loadgroup
test-matrix: $(TRITON) ## every published layout by the abilities in CELLS (half an hour); writes the table
	R3_MATRIX=1 $(PY) -m pytest tests/matrix -q $(MATRIX_ARGS) -k "$$(echo $(CELLS) | sed 's/ /- or /g')-" \
	  || code=$$?; $(PY) tools/make_docs.py; exit $${code:-0}

lint: setup ## ruff check, format check, mypy
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy

fmt: setup ## format, and repair what ruff can
	$(PY) -m ruff format $(CODE)
	$(PY) -m ruff check --fix $(CODE)

docs: ## build docs/ as a web site in docs/_build/html, every link checked (own environment: .venv-docs)
	@[ -x .venv-docs/bin/python ] || python3 -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --disable-pip-version-check -q -r requirements/docs.txt
	.venv-docs/bin/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html

lock: setup ## resolve requirements/cpu.in into both locks; LOCK_ARGS=--upgrade moves the pins (needs the network)
	set -e; for lock in cpu=3.11 cpu-py312=3.12; do \
	  $(UV) pip compile requirements/cpu.in --override requirements/overrides.txt \
	    --python-version $${lock#*=} --python-platform x86_64-manylinux_2_28 \
	    --custom-compile-command 'make lock   (how and why: requirements/README.md)' \
	    --output-file requirements/$${lock%=*}.txt --quiet $(LOCK_ARGS); done

# Wheels only, as on a cluster without compilers. llguidance, which vLLM needs, asks for glibc 2.31.
resolve: setup ## resolve the GPU stack for each supported vLLM and Python (needs the network)
	@set -e; for vllm in 0.32.0 0.30.0 0.26.0; do for python in 3.12 3.11; do \
	  printf 'vllm %s, Python %s: ' $$vllm $$python; \
	  echo "vllm==$$vllm" | $(UV) pip compile pyproject.toml - --extra gpu --extra dev --quiet \
	    --only-binary :all: --no-header --no-annotate --python-version $$python \
	    --python-platform x86_64-manylinux_2_31 >.resolved; \
	  grep -E '^(torch|megatron-core|transformers|numpy)==' .resolved | paste -s -d ' '; \
	done; done; rm .resolved

signatures: setup ## read what R3 calls from the wheels (4 GB once, into .upstream); NEW=vllm==0.34.0: what moved
	$(PY) tools/upstream.py $(if $(NEW),--new $(NEW))

gpu-bundle: setup ## pack vLLM and packages for a GPU machine without a network (44 MB, into gpu-bundle/)
	$(PY) tools/gpu_bundle.py gpu-bundle

clean: ## remove caches and build outputs; keeps .venv and runs/
	rm -rf build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
