# Every target does its own set-up; a repeated call installs nothing.
SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements/torch-cpu.lock requirements/cpu.lock
STAMP := $(VENV)/.installed
# An unreachable index then costs seconds, and a wheel that pip finds elsewhere is used.
TORCH_INDEX := --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu

PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-deps
NUM_PINS = $(shell grep -c '==' requirements/cpu.lock)
# One moving line on a terminal, a line every 20 packages elsewhere; errors always.
PROGRESS = awk -v tty=$$(test -t 1 && echo 1 || echo 0) -f requirements/progress.awk

.PHONY: help setup quickstart test lint format bench bench-gpu test-gpu checkpoint clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with the pinned CPU stack and sparkrl (about two minutes)

$(STAMP): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v[:2] <= (3, 12); \
	  ok or sys.exit(f"error: Python 3.11 or 3.12 is needed, got: {v[0]}.{v[1]}\n\nhint: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 2**30; \
	  free > 6 or sys.exit(f"error: the virtual environment takes about 5 GiB, free here: {free:.1f} GiB")'
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch, CPU build"
	@$(PIP) $(TORCH_INDEX) -r requirements/torch-cpu.lock 2>&1 | $(PROGRESS) -v total=1
	@echo "[3/4] $(NUM_PINS) pinned packages"
	@$(PIP) --no-compile -r requirements/cpu.lock 2>&1 | $(PROGRESS) -v total=$(NUM_PINS)
	@echo "[4/4] sparkrl"
	@$(PIP) --quiet --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, vllm, verl, ray, transformers, sparkrl' 2>/dev/null \
	  || { echo "error: the installed stack does not import; see: $(BIN)/sparkrl doctor"; exit 1; }
	@touch $(STAMP)

quickstart: $(STAMP) ## Train the tiny Muse Spark with GRPO and open the result in runs/quickstart/latest/report.html
	@$(BIN)/sparkrl train recipe=quickstart

test: $(STAMP) ## Run every test that needs no GPU
	@$(BIN)/python -m pytest tests --ignore=tests/gpu

lint: $(STAMP) ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(STAMP) ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

checkpoint: $(STAMP) ## Rebuild the quickstart's tiny checkpoint and data from scratch (fixed seed)
	@$(BIN)/python recipes/quickstart/build.py --out recipes/quickstart/checkpoint

bench: $(STAMP) ## Measure speed as ratios, side by side in one run
	@$(BIN)/python -m benchmarks

bench-gpu: ## Measure Muse Spark on this machine's GPU, into runs/bench/gpu_*.json (an environment with vLLM for CUDA)
	@mkdir -p runs/bench
	@$(PYTHON) -m benchmarks.gpu --out runs/bench/gpu.json
	@for name in expert_lora swap dequantize head stock_forms; do \
	  $(PYTHON) -m benchmarks.gpu_$$name --out runs/bench/gpu_$$name.json; done
	@$(PYTHON) -m benchmarks.gpu_rollout --out runs/bench/gpu_rollout.json --models runs/bench/gpu_models

test-gpu: ## Run the tests that need a GPU (an environment with vLLM for CUDA)
	@$(PYTHON) -m pytest tests/gpu

clean: ## Remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) .ruff_cache .mypy_cache build *.egg-info
