# Each target does its own set-up: a virtual environment in .venv, pinned by constraints.txt, installed once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PORT ?= 3000
# Tests that replay nothing natively and time nothing, in two parts. Of the others most need the machine's one lock.
PURE_1 := $(patsubst %,tests/test_%.py,accounting bad_dumps benefit boundaries bundle_file canonical checkpoints containers curves \
  decoder disclosure docs dumps dumps_hooks dumps_llama_cpp dumps_megatron dumps_repeats dumps_rl \
  dumps_router_logits dumps_sglang \
  dumps_tensorrt_llm dumps_vllm experiment_report export fuzz_dumps hit_curves hostile intervals inversion libcachesim \
  locality lookahead lookahead_cli lookahead_effect lookahead_report model_sizes open_format plan policies predictors \
  prefetch priorities)
PURE_2 := $(patsubst %,tests/test_%.py,answer_views compare decode_report lab_report placement published_values quantities queues \
  reclaim_report reclaim_views report \
  sample schemas simulate simulate_cli streams sweep token_identity trace user_cache validator verify warehouse)
# Whole commands and the graph: they replay as well, but mostly compute.
COMMANDS := $(patsubst %,tests/test_%.py,cli cli_replays decode graph native_graph)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-native test-commands test-guests test-pure-1 test-pure-2 types dev bench lab-setup lab format clean

demo: $(INSTALLED)
	@$(BIN)/expert-tier demo

# Three jobs at a time, each printed when it ends: first the tests that wait for the disk and for each other. Beside them
# the types, so that what numba compiles for the first is on disk when the others come to need it. What replays is in two
# parts, since each waits for the machine's one lock for a part of its time only.
test: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target --keep-going test-native test-commands types \
	  test-guests test-pure-1 test-pure-2

test-native: $(INSTALLED)
	@$(BIN)/pytest -rs --ignore=tests/test_lab.py $(COMMANDS:%=--ignore=%) $(PURE_1:%=--ignore=%) $(PURE_2:%=--ignore=%)

test-commands: $(INSTALLED)
	@$(BIN)/pytest -rs $(COMMANDS)

test-guests: $(INSTALLED)
	@$(BIN)/pytest -rs tests/test_lab.py

test-pure-1: $(INSTALLED)
	@$(BIN)/pytest -rs $(PURE_1)

test-pure-2: $(INSTALLED)
	@$(BIN)/pytest -rs $(PURE_2)

types: $(INSTALLED)
	$(BIN)/mypy
	$(BIN)/dagster definitions validate

# SIGINT and SIGTERM are given their default action back, since Dagster keeps what a background shell leaves ignored.
dev: $(INSTALLED)
	mkdir -p data/dumps
	env --default-signal=INT,TERM $(BIN)/dagster dev -h 127.0.0.1 -p $(PORT)

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench $(WHAT)

# A kernel of the distribution, unpacked below data/ and never installed; QEMU is installed where it is missing.
lab-setup: $(INSTALLED)
	@$(BIN)/replayer lab setup --data data

# The whole matrix on the bundled sample, whose experts are taken as 1 MiB each; goes on where it was stopped.
lab: lab-setup
	@$(BIN)/expert-tier ingest pipeline/sample/code.route.csv.gz --meta expert_bytes=1048576 --trace-id lab-sample --data data
	@$(BIN)/replayer pool build --trace data/traces/lab-sample.parquet --layout per-layer --out data/pools/lab-sample
	@$(BIN)/replayer lab run data/traces/lab-sample.parquet --pool data/pools/lab-sample --data data

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Not compiled as a whole, which takes twice as long as all the rest: Python compiles what it imports.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is older; run: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
