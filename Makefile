# Everything a person does with a checkout. `make` alone lists the targets.

PYTHON ?= python3
PROMPT ?= What is 2 + 2?
WORKERS ?= 2

venv := .venv
python := $(venv)/bin/python
pip := $(python) -m pip --disable-pip-version-check
pins := requirements/constraints.txt

.PHONY: help run chat test test-slow sanitize check clean

help:
	@echo "make run        set up, get the default model and answer a prompt (PROMPT='...')"
	@echo "make chat       the same, as a conversation"
	@echo "make test       set up and run the tests"
	@echo "make test-slow  the tests that take more than a minute each"
	@echo "make sanitize   the native library's tests under address, undefined-behaviour and thread sanitizers"
	@echo "make check      ruff, and mypy --strict on the package"
	@echo "make clean      remove the virtual environment and everything built"

# The prompt travels in the environment, as it was typed: neither make nor the shell looks for $ or quotes in it.
run: export prompt := $(value PROMPT)
run: $(venv)/.installed
	@$(venv)/bin/tokenmill run --temperature 0 -- "$$prompt" < /dev/null

chat: $(venv)/.installed
	@$(venv)/bin/tokenmill chat

# One thread per worker: two workers that each start a thread per core would fight over the cores.
test test-slow: export OMP_NUM_THREADS = 1
test: $(venv)/.installed-dev
	$(python) -m pytest -n $(WORKERS)

test-slow: $(venv)/.installed-dev
	$(python) -m pytest -n $(WORKERS) -m slow

sanitize: $(venv)/.installed-dev
	$(python) -m pytest -m 'slow or not slow' tests/native_lib -k sanitizer

check: $(venv)/.installed-dev
	$(venv)/bin/ruff check tokenmill tests scripts
	$(venv)/bin/mypy

clean:
	rm -rf $(venv) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find tokenmill tests -name __pycache__ -prune -exec rm -rf {} +

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tokenmill needs Python 3.11 or newer and $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(venv)

# torch comes first and on its own: its pin decides which of the many large builds is downloaded.
$(venv)/.installed: $(python) pyproject.toml $(pins)
	$(pip) install -c $(pins) setuptools torch
	$(pip) install --quiet -c $(pins) --no-build-isolation -e .
	@touch $@

# A CUDA build of torch brings its own Triton; beside a CPU build it is only wanted for its interpreter.
$(venv)/.installed-dev: $(venv)/.installed
	$(pip) install --quiet -c $(pins) --no-build-isolation -e '.[dev,serve,otel]'
	@$(python) -c 'import triton' 2> /dev/null || $(pip) install --quiet "triton==3.6.0; sys_platform == 'linux'"
	@touch $@
