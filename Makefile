# `make demo` and `make test` do all the set-up themselves, in .venv, and only once.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-slow chaos lint bench catalogue tables clean

demo: .venv/ready
	$(BIN)/python -m orchestrator.tune

test: lint
	$(BIN)/python -m pytest

test-slow: .venv/cluster
	$(BIN)/python -m pytest -m slow

# Kills at random points; FEDTAIL_CHAOS_SEED=N repeats those of a test that has failed.
chaos: .venv/ready
	$(BIN)/python -m pytest -m chaos

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

bench: .venv/ready
	$(BIN)/python benchmarks/bench.py --peers --repeats 3
	$(BIN)/python benchmarks/round_cost.py

catalogue: .venv/ready
	$(BIN)/python -m orchestrator.catalogue README.md

# The tables of README.md and docs/, from what is kept in results/.
tables: .venv/ready
	$(BIN)/python results/documents.py

.venv/cluster: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,cluster]'
	touch $@

clean:
	rm -rf .venv benchmarks/.peers .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
