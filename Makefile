# Each target creates what it needs: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?=

.DEFAULT_GOAL := help
.PHONY: help demo chat serve test check bench clean

help:
	@echo "make demo   a conversation over kill -9 and a truncation; what each turn costs, in a table"
	@echo "make chat   talk to the built-in model (MODEL=... for another one)"
	@echo "make serve  answer over HTTP on port 8000, with a web page (MODEL=... for another model)"
	@echo "make test   the tests"
	@echo "make check  ruff, mypy and the tests"
	@echo "make bench  the benchmarks (minutes; results go to the terminal)"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV) (once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m service.demo

chat: $(STAMP)
	@$(BIN)/kvstore chat $(MODEL)

serve: $(STAMP)
	@$(BIN)/kvstore serve $(MODEL)

test: $(STAMP)
	@$(BIN)/python -m pytest

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest

bench: $(STAMP)
	@$(BIN)/python -m bench.throughput

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
