# Short names for the scripts; each sets the environment up on its first call.
.PHONY: install fast test all lint example docs metric-docs config-docs

install:
	bash -c 'set -euo pipefail; source scripts/environment.sh; environment requirements-dev.txt'

fast:
	bash scripts/run_tests.sh --fast

test:
	bash scripts/run_tests.sh

all:
	bash scripts/run_tests.sh --all

lint: install
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

example:
	bash scripts/run_example.sh

metric-docs: install
	.venv/bin/python scripts/metric_docs.py

config-docs: install
	.venv/bin/python scripts/config_docs.py
	.venv/bin/python scripts/config_schema.py
	.venv/bin/python scripts/familiar_names.py

docs: install
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
