# Everything a person does with a checkout. `make` alone lists the targets.

PYTHON ?= python3
PROMPT ?= What is 2 + 2?
WORKERS ?= 2

venv := .venv
python := $(venv)/bin/python
pins := requirements/constraints.txt

# UV=1 sets up with uv instead of venv and pip. uv is also used where Python comes without those, or is too old.
UV ?=
usable := $(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
uv := $(if $(UV),uv,$(shell $(usable) || command -v uv))
install := $(if $(uv),$(uv) pip install --python $(python),$(python) -m pip --disable-pip-version-check install)
# New pips go on with a download that was cut; older ones do not mind the variable.
export PIP_RESUME_RETRIES ?= 5

# In the environment, so that a command that is shown stays readable.
export stopped := echo "error: setting up stopped (the lines above say why); make the same target again, and it goes on with what is here" >&2; exit 1

.PHONY: help run chat test test-slow test-avx2 test-baseline sanitize check rehearse clean

help:
	@echo "make run        set up, get the default model and answer a prompt (PROMPT='...')"
	@echo "make chat       the same, as a conversation"
	@echo "make test       set up and run the tests"
	@echo "make test-slow  the tests that take more than a minute each, and property-based ones on new examples"
	@echo "make test-avx2  the tests with the CPU held down to AVX2; test-baseline: to SSE4"
	@echo "make sanitize   the native library's tests under address, undefined-behaviour and thread sanitizers"
	@echo "make check      ruff, and mypy --strict on the package"
	@echo "make rehearse   make run and make test in a fresh clone with empty caches (REHEARSE='--help' lists its options)"
	@echo "make clean      remove the virtual environment and everything built"

# The prompt travels in the environment, as it was typed: neither make nor the shell looks for $ or quotes in it.
run: export prompt := $(value PROMPT)
run: $(venv)/.installed
	@$(venv)/bin/tokenmill run --temperature 0 -- "$$prompt" < /dev/null

chat: $(venv)/.installed
	@$(venv)/bin/tokenmill chat

# One thread per worker: two workers that each start a thread per core would fight over the cores.
test test-slow test-avx2 test-baseline: export OMP_NUM_THREADS = 1
test: $(venv)/.installed-dev
	$(python) -m pytest -n $(WORKERS)

test-slow: $(venv)/.installed-dev
	$(python) -m pytest -n $(WORKERS) -m 'slow or hypothesis' --hypothesis-profile=new

# What only holds on the builder's CPU fails in one of these: torch, numpy and the native library use no more than this.
test-avx2 test-baseline: $(venv)/.installed-dev
	$(python) tests/cpu_level $(@:test-%=%) -m pytest -n $(WORKERS)

sanitize: $(venv)/.installed-dev
	$(python) -m pytest -m 'slow or not slow' tests/native_lib -k sanitizer

check: $(venv)/.installed-dev
	$(venv)/bin/ruff check tokenmill tests scripts
	$(venv)/bin/mypy

rehearse:
	@scripts/rehearse.sh $(REHEARSE)

clean:
	rm -rf $(venv) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find tokenmill tests -name __pycache__ -prune -exec rm -rf {} +

# uv brings a Python where there is none that is new enough.
$(python): export which := import sys; print(sys.executable if sys.version_info >= (3, 11) else '>=3.11')
$(python):
	@$(if $(uv),true,$(usable)) || { echo "error: tokenmill needs Python 3.11 or newer with venv and pip, or uv," \
		"and $(PYTHON) is not that; make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(if $(uv),$(uv) venv --python "$$($(PYTHON) -c "$$which" 2> /dev/null || echo '>=3.11')",$(PYTHON) -m venv) $(venv) || sh -c "$$stopped"

# A kill may have left an environment without pip. torch comes first and on its own: its pin decides which of the many
# large builds is downloaded.
$(venv)/.installed: $(python) pyproject.toml $(pins)
	@$(if $(uv),true,$(python) -m pip --version > /dev/null 2>&1 || $(python) -m ensurepip)
	$(install) -c $(pins) setuptools torch || sh -c "$$stopped"
	$(install) --quiet -c $(pins) --no-build-isolation -e . || sh -c "$$stopped"
	@touch $@

# A CUDA build of torch brings its own Triton; beside a CPU build it is only wanted for its interpreter.
$(venv)/.installed-dev: $(venv)/.installed
	$(install) --quiet -c $(pins) --no-build-isolation -e '.[dev,serve,otel]' || sh -c "$$stopped"
	@$(python) -c 'import triton' 2> /dev/null || $(install) --quiet "triton==3.6.0; sys_platform == 'linux'"
	@touch $@
