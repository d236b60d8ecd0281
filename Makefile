# `make` alone lists the targets. Everything slow to make again (compiled crates, the demo's weights, a Python
# environment) lies in one cache outside the checkout; losing it costs time only.
SHELL := /bin/bash
.DEFAULT_GOAL := help

export WEIGHTREFIT_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/weightrefit
ifndef CARGO_TARGET_DIR
export CARGO_TARGET_DIR := $(shell tests/cache target)
endif

BIN := $(CARGO_TARGET_DIR)/release
EXAMPLE ?= examples/minilm.yaml
ROUNDS ?= 3

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tools:
	@tests/tools

weights: tools ## Fetch the demo's weights into the cache (once, checked against a pinned sha256)
	@examples/fetch-weights

build: tools weights ## Build the release binaries
	@tests/fresh.py cargo build --release --locked --workspace

demo: tools weights ## Run three rounds on real weights: 4 training ranks to 2 replicas of 2
	@tests/fresh.py bash -euc 'cargo build --release --locked --workspace; \
	    exec $(BIN)/weightrefit local -f $(EXAMPLE) --rounds $(ROUNDS)'

test: tools ## Run every check: format, lints, docs, Rust and Python tests, the demo
	@tests/run

test-torch: tools ## Run the Python client with real PyTorch (fetches 3 GB once)
	@tests/run build torch

test-ray: tools ## Run the adapters for NeMo RL and verl on Ray itself (fetches 90 MB once)
	@tests/run build ray

test-engines: tools ## Refit a real vLLM from real FSDP2 ranks (fetches 3 GB once, 6 GB installed)
	@tests/run build engines

chart-test: ## Check the charts: lint, schemas, what is rendered, alerts
	@tests/run helm kubeconform charts

e2e: build ## Install on a real node and use it; builds the node once, in 15 minutes
	@WEIGHTREFIT_BIN=$(BIN) tests/e2e/run

bench: build ## Measure transfer and digest; prints tables and writes target/bench/*.json
	@tests/fresh.py cargo bench --locked --workspace --bench '*'

bench-client: build ## Measure what the Python client costs; prints figures and writes target/bench/client.json
	@WEIGHTREFIT_BIN="$(BIN)" "$$(tests/venv venv)/bin/python" agent/python/benches/client.py

wheel: build ## Pack client, command line and agent into target/wheel/*.whl, for pip
	@rm -rf target/wheel
	@WEIGHTREFIT_BIN="$(BIN)" "$$(tests/venv venv)/bin/python" -m pip wheel --quiet --no-index --no-deps \
	    --no-build-isolation --wheel-dir target/wheel ./agent/python
	@ls target/wheel/*.whl

kernels: ## Compile the CUDA kernels anew (fetches nvcc, 280 MB, once)
	agent/kernels/build

bench-nccl: build ## Measure the NCCL transport on the double; writes target/bench/nccl.json
	tests/nccl/bench

lint: tools ## Check format, lints and documentation only
	@tests/run format clippy docs

fmt: tools ## Format the Rust code
	cargo fmt --all

clean: ## Remove build output of this checkout and the compiled crates in the cache
	rm -rf target "$(CARGO_TARGET_DIR)"

.PHONY: help tools weights build demo test test-torch test-ray test-engines chart-test e2e bench bench-client bench-nccl wheel kernels lint fmt clean
