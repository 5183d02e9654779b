# The one vocabulary: people and CI call the same targets.
PYTHON ?= python3
DEMO_MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(DEMO_MODEL)
SHARDS ?= 1
ARGS ?=
MINUTES ?= 20
BIN := .venv/bin
INSTALLED := .venv/.installed
# Clients whose pins collide with ours, or that bring much along, have environments of their own.
CLIENT := .cache/clients/text-generation/.installed
CLIENTS := $(patsubst tests/e2e/clients/%.txt,.cache/clients/%/.installed,$(wildcard tests/e2e/clients/*.txt))

.PHONY: help run test test-clients check lint format proto openapi docs bench soak clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(INSTALLED) $(MODEL) ## set up what is missing and serve MODEL (default: demo model) with SHARDS shards; ARGS: more flags
	$(BIN)/caravan serve --model $(MODEL) --shards $(SHARDS) $(ARGS)

test: $(INSTALLED) $(DEMO_MODEL) $(CLIENT) ## the whole test suite; ARGS: more pytest flags
	$(BIN)/pytest $(ARGS)

test-clients: $(INSTALLED) $(DEMO_MODEL) $(CLIENTS) ## more clients, each in its own environment, and nginx (apt-get install nginx-light)
	$(BIN)/pytest -m clients $(ARGS)

check: lint $(DEMO_MODEL) $(CLIENT) ## format, lint, types, import rules, drift, spelling, tests with coverage
	$(BIN)/pytest --cov --cov-report=
	$(BIN)/coverage report --include='*/caravan_router/scheduling/*' --fail-under=95

lint: $(INSTALLED) ## all of check but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	$(BIN)/codespell

format: $(INSTALLED) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(INSTALLED) ## generate the Python code of the .proto files
	proto/generate.sh

openapi: $(INSTALLED) ## generate openapi.json from the request and response types
	$(BIN)/python -m caravan_router.http.openapi > router/caravan_router/http/openapi.json

docs: $(INSTALLED) ## write the tables of the documentation that the code knows
	$(BIN)/python docs/doc_tables.py

bench: $(INSTALLED) $(MODEL) ## build llama-server and llama-batched-bench (once) and measure side by side; ARGS: more flags
	PYTHONPATH=tests $(BIN)/python -m bench.build_peers
	PYTHONPATH=tests $(BIN)/python -m bench.compare --model $(MODEL) $(ARGS)

soak: $(INSTALLED) $(DEMO_MODEL) ## random load with too few cells for MINUTES: no error, nothing grows; ARGS: more flags
	PYTHONPATH=tests $(BIN)/python -m soak.soak --minutes $(MINUTES) $(ARGS)

clean: ## remove the environment and everything downloaded or built here
	rm -rf .venv .cache

$(INSTALLED): pyproject.toml constraints.txt deploy/setup/install.py
	$(PYTHON) deploy/setup/install.py

.cache/clients/%/.installed: tests/e2e/clients/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	touch $@

$(DEMO_MODEL): | $(INSTALLED)
	$(BIN)/python deploy/setup/fetch_model.py $@
