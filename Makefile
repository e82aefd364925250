# Every command of the README is a target here. Each one installs what it needs first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BENCHMARKS := $(filter-out benchmarks/soak.py, $(wildcard benchmarks/*.py))  # that one watches a run

# Through the environment rather than --constraint, so that the build backend is pinned too.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo reproduce test test-slow lint format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

install: $(INSTALLED)  ## create .venv with the exact versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## reproduce the chain-walk figure, train a little, make the pages
	@$(BIN)/cbsql demo

reproduce: $(INSTALLED)  ## all runs behind results/ anew, with a page; DRY=--dry-run lists them
	@$(if $(DRY),,for retreat in back stay start; do for end in timelimit terminal; do \
		$(BIN)/cbsql reproduce chain --retreat $$retreat --end $$end --all-schedules \
			--out runs/chain/$$retreat-$$end || exit; done; done)
	@for list in results/*/runs.yaml; do folder=$${list%/runs.yaml}; echo $$list; \
		$(BIN)/cbsql sweep $$list --out runs/$${folder#results/} $(DRY) || exit; done
	@for table in table2 table1; do echo $$table; \
		$(BIN)/cbsql reproduce $$table --out runs/$$table $(DRY) || exit; done
	@$(if $(DRY),,$(BIN)/cbsql report runs --out runs/report)

test: $(INSTALLED)  ## all but the slow tests
	$(BIN)/pytest -n 2

test-slow: $(INSTALLED)  ## the slow tests only
	$(BIN)/pytest -n 2 -m slow

lint: $(INSTALLED)  ## formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## measure speed, each figure beside something to compare it with
	@$(BIN)/cbsql bench
	@for benchmark in $(BENCHMARKS); do $(BIN)/python $$benchmark || exit 1; done

clean:  ## remove what was installed or cached; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
