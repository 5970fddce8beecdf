# Short names for the scripts; each sets the environment up on its first call.
# VENV is the environment's folder (default: .venv); with PYTHON=..., `lint` and the pages use that Python, and install nothing.
.PHONY: install fast test all lint example docs metric-docs config-docs

VENV ?= .venv
export VENV
ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
ENVIRONMENT := install
endif

install:
	bash -c 'set -euo pipefail; source scripts/environment.sh; environment requirements-dev.txt'

fast:
	bash scripts/run_tests.sh --fast

test:
	bash scripts/run_tests.sh

all:
	bash scripts/run_tests.sh --all

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

example:
	bash scripts/run_example.sh

metric-docs: $(ENVIRONMENT)
	$(PYTHON) scripts/metric_docs.py

config-docs: $(ENVIRONMENT)
	$(PYTHON) scripts/config_docs.py
	$(PYTHON) scripts/config_schema.py

docs: $(ENVIRONMENT)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
