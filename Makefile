# Every target brings .venv up to date first (a fraction of a second when it is).
# Paths are relative, so the repository may lie in a folder with spaces.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON := .venv/bin/python

# DATA is one path and is quoted for the shell; ARGS is a list and the shell splits it:
#   make train DATA="my chats.jsonl" ARGS="--train-samples 512 --log 'run 1.log'"
export DATA
ARGS ?=
# Test files at a time. Many tests start up to four processes themselves.
JOBS ?= 2

# Megatron versions of test-matrix; all when empty.
VERSIONS ?=

.PHONY: help venv venv-modelopt train test test-bridge test-modelopt test-matrix test-slurm lint format typecheck verify bench docs wheel dist clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: ## build .venv from requirements/dev.lock (ODB_PYTHON=/path/to/python3.12 chooses the interpreter)
	@tools/bootstrap.sh

train: venv ## train a small chat model (DATA=chats.jsonl, ARGS="...")
	$(PYTHON) examples/train_chat.py $(if $(DATA),--data "$$DATA") $(ARGS)

test: venv ## run the tests (ARGS="-k plan -x", JOBS=0 for one after the other in this process)
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/test_slurm_jobs.py $(ARGS)

test-slurm: venv ## run the job scripts of launch/ on a Slurm of two nodes here (Debian: installs it)
	@tools/slurm_cluster.sh install
	$(PYTHON) -m pytest tests/test_launch_scripts.py tests/test_slurm_jobs.py $(ARGS)

test-matrix: venv ## Megatron tests on each supported version (VERSIONS="0.18.2")
	$(PYTHON) tools/test_matrix.py --jobs $(JOBS) $(VERSIONS) $(ARGS)

test-bridge: venv ## run the tests on Megatron-Bridge (NeMo), in an environment of its own
	@tools/overlay_venv.sh bridge
	CUDA_VISIBLE_DEVICES= .venv-bridge/bin/python -m pytest tests/test_overlay_venv.py \
	    tests/test_bridge_config.py tests/test_bridge_run.py $(ARGS)

venv-modelopt: venv ## .venv with NVIDIA ModelOpt on top, in .venv-modelopt
	@tools/overlay_venv.sh modelopt

test-modelopt: venv-modelopt ## run the tests of quantization and distillation, in that environment
	CUDA_VISIBLE_DEVICES= .venv-modelopt/bin/python -m pytest tests/test_overlay_venv.py \
	    tests/test_modelopt_losses.py tests/test_modelopt_stages.py $(ARGS)

lint: venv ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: venv ## ruff: mend and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

typecheck: venv ## mypy --strict
	$(PYTHON) -m mypy $(ARGS)

verify: venv ## check the protocol's model with SPIN (ARGS="--quick --json OUT")
	$(PYTHON) verification/run.py $(ARGS)

bench: venv ## every figure of the docs beside its goal: build/bench/bench.json (ARGS="--only planner --full")
	$(PYTHON) benchmarks/bench.py $(ARGS)

docs: venv ## build the documentation's site in build/docs, warnings are errors (no network)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet $(ARGS)
	@echo "build/docs/index.html"

wheel: venv ## build dist/*.whl
	@rm -rf build/lib build/bdist.*
	$(PYTHON) -m build --wheel --no-isolation --outdir dist .

dist: venv ## build dist/*.tar.gz and, from it, dist/*.whl, and check their metadata
	@rm -rf build/lib build/bdist.*
	@rm -f dist/odb_megatron-*
	$(PYTHON) -m build --no-isolation --outdir dist .
	$(PYTHON) -m twine check --strict dist/odb_megatron-*

clean: ## remove build output and caches
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the environments as well
	rm -rf .venv .venv.lock .venvs .venv-bridge .venv-bridge.lock .venv-modelopt .venv-modelopt.lock
