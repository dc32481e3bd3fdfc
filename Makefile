# The two commands people need: `make up` and `make test`. Everything else serves them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: up test test-fast check generate bench install install-dev system-packages lock clean help

help:
	@echo "make up         install into .venv, find LLM servers on this host, attach, show live numbers"
	@echo "make test       the whole suite: real vLLM on CPU, real llama.cpp, Prometheus, Alertmanager"
	@echo "make test-fast  the tests that need no engine and no Prometheus"
	@echo "make check      ruff, mypy --strict, import-linter, generated files up to date"
	@echo "make generate   rules, dashboards and docs/metrics.md from their sources"
	@echo "make bench      our own cost and speed, against named peers"

up: install
	@$(BIN)/servoscope up $(ARGS)

test: install-dev system-packages
	$(BIN)/pytest $(ARGS)

test-fast: install-dev
	$(BIN)/pytest -m "not engine and not stack and not root" $(ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m servoscope.exporters.generate --check
	$(BIN)/python -m servoscope.alerts.generate --check
	$(BIN)/python -m servoscope.dashboards.generate --check

generate: install-dev
	$(BIN)/python -m servoscope.exporters.generate
	$(BIN)/python -m servoscope.alerts.generate
	$(BIN)/python -m servoscope.dashboards.generate

bench: install-dev
	$(BIN)/python benchmarks/run.py $(ARGS)

# A stamp per set: a second `make up` starts at once.
install: $(VENV)/.up
install-dev: $(VENV)/.dev

$(VENV)/bin/python:
	@./scripts/venv.sh "$(PYTHON)" "$(VENV)"

$(VENV)/.up: $(VENV)/bin/python requirements/up.txt pyproject.toml
	@echo "installing Servoscope into $(VENV) (about a minute the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/up.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.up requirements/dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

system-packages:
	@./scripts/system-packages.sh

# Hashed, without registry hosts. uv.lock would name them, so it is not used.
lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-emit-find-links --no-annotate --no-header --extra all pyproject.toml requirements/build.in -o requirements/up.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-emit-find-links --no-annotate --no-header --extra all --extra dev pyproject.toml requirements/build.in -o requirements/dev.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
