# Everything below needs only Python 3.11 or newer; the first target that needs it makes .venv: with what the demo needs,
# and then with what development needs.
#   make demo PYTHON=python3.12        another interpreter than python3
#   make demo TORCH_INDEX=URL          torch from another package index than pip's own
# On Linux the torch of PyPI brings CUDA libraries (about 5 GB installed). PyTorch's index of CPU builds is
# https://download.pytorch.org/whl/cpu (about 1 GB).
PYTHON ?= python3
TORCH_INDEX ?=
CHECK_PYTHON = import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("error: $(PYTHON) is Python " \
	"%d.%d, and Python 3.11 or newer is needed; run: make PYTHON=python3.12 $(MAKECMDGOALS)" % v)
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
PLUGINS := ./plugins/kubernetes ./plugins/sglang ./plugins/tinker ./plugins/weights

.DEFAULT_GOAL := help
.PHONY: help demo test test-integration test-slow test-chaos test-pythons lint type contracts check bench peers frameworks frameworks-table examples docs reference site clean

help:  ## Say what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch goes first, by its pin: anything that depends on it would otherwise bring gigabytes of CUDA packages.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
$(DEMO): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c '$(CHECK_PYTHON)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) -e '.[demo]'
	touch $(DEMO)

$(STAMP): $(DEMO) $(wildcard plugins/*/pyproject.toml)
	$(PIP) -e '.[dev]' $(PLUGINS:%=-e %)
	touch $(STAMP)

demo: $(DEMO)  ## Train a real agent on this machine and measure the gain; MODEL=smollm2-135m: of a pretrained model
	$(BIN)/agl demo $(if $(MODEL),--model $(MODEL))
	@echo 'agl is $(BIN)/agl here: source $(BIN)/activate, and then agl train --help'

# Many tests start programs, which takes a third less with the bytecode of the one before.
test: $(STAMP)  ## Run the default tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 3 --dist worksteal

test-integration: $(STAMP)  ## Run the tests of whole trainings, runners and servers
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m 'integration and not slow and not chaos and not gpu' -n 3 --dist worksteal

test-slow: $(STAMP)  ## Run the slow tests
	$(BIN)/pytest -m slow --timeout 900

test-chaos: $(STAMP)  ## Run the tests that kill processes and fill disks
	$(BIN)/pytest -m chaos --timeout 900

test-pythons: $(STAMP)  ## Run tests that need no torch on the other Pythons of this machine (of 3.11, 3.12 and 3.13, or newer)
	tests/pythons.sh

lint: $(STAMP)  ## Check style and formatting
	$(BIN)/ruff check src plugins tests tools benchmarks examples
	$(BIN)/ruff format --check src plugins tests tools benchmarks examples

type: $(STAMP)  ## Check types (pyright, strict on src)
	$(BIN)/pyright

contracts: $(STAMP)  ## Check the design's laws of import
	$(BIN)/lint-imports

check: lint type contracts test test-integration  ## All of the above, as CI does

bench: $(STAMP)  ## Run the benchmarks (with the peers that make peers has made)
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/real_model.py sampling --prompts 60 --rounds 3
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/store_http.py
	$(BIN)/python benchmarks/otlp.py
	$(BIN)/python benchmarks/emit.py
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/scale.py --largest 100000
	$(BIN)/python benchmarks/updates.py --rounds 2
	$(BIN)/python benchmarks/gateway.py

peers:  ## Make the environments of the peers for the benchmarks (.peers/)
	benchmarks/peers.sh

frameworks:  ## Make the environments of the agent frameworks for make test-slow (.peers/frameworks/)
	tests/frameworks/setup.sh

frameworks-table: $(STAMP) frameworks  ## Measure the agent frameworks and write the table of docs/guides/frameworks.md
	$(BIN)/python -m tests.frameworks.measuring

examples:  ## Make the environments of the examples for make test-slow (.peers/examples/)
	tests/examples/setup.sh

docs: $(STAMP)  ## Run every code block of the documentation
	$(BIN)/pytest tests/docs

reference: $(STAMP)  ## Write the pages of docs/reference that are made from the code, and not in git
	$(BIN)/python -m tools.reference

SITE := .peers/site
site: $(STAMP)  ## Build the documentation site in build/site/html; fails on a warning or a dead link
	test -x $(SITE)/bin/zensical || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check zensical==0.0.73
	$(BIN)/python -m tools.site --zensical $(CURDIR)/$(SITE)/bin/zensical

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
