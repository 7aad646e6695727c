# Each target does its own set-up: a virtual environment in .venv, pinned by constraints.txt, installed once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PORT ?= 3000
# Tests that replay nothing natively and time nothing: they run beside the others, which need the machine's one lock.
PURE_TESTS := $(patsubst %,tests/test_%.py,bad_dumps canonical checkpoints curves disclosure dumps hit_curves hostile \
  intervals inversion libcachesim locality lookahead policies priorities published_values queues report sample simulate \
  simulate_cli streams sweep trace user_cache warehouse)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test dev bench format clean

demo: $(INSTALLED)
	@$(BIN)/expert-tier demo

test: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/dagster definitions validate
	@$(BIN)/pytest -rs $(PURE_TESTS) >.pure-tests.log 2>&1 & pure=$$!; \
	  trap "kill $$pure 2>/dev/null; exit 130" INT TERM; \
	  $(BIN)/pytest -rs $(PURE_TESTS:%=--ignore=%); machine=$$?; wait $$pure; pure=$$?; \
	  cat .pure-tests.log; exit $$((machine | pure))

# SIGINT and SIGTERM are given their default action back, since Dagster keeps what a background shell leaves ignored.
dev: $(INSTALLED)
	mkdir -p data/dumps
	env --default-signal=INT,TERM $(BIN)/dagster dev -h 127.0.0.1 -p $(PORT)

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench $(WHAT)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is older; run: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pure-tests.log build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
