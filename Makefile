PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup proto

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/.installed ## Create .venv and install everything into it

.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[worker,local,dev]'
	touch $@

proto: setup ## Generate quire/v1 from proto/
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. \
	  --grpc_python_out=. --mypy_grpc_out=quiet:. proto/quire/v1/*.proto
