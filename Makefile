# Every target makes the environment it needs. On a fresh clone, with Python 3.11 or newer and a package index:
#
#   make compare                        the paths of one layer side by side, in out/compare
#   make compare ARGS="--backward"      arguments of scripts/compare.py
#   make test                           the tests;  ARGS="tests/test_plan.py -x" goes to pytest, ARGS="-m slow" runs the long ones
#   make bench                          grouped products and the one-device layer against dense ones
#   make bench-gpu                      grouped products and whole layers on a GPU: checked, then timed beside their peers
#   make generate                       tokens from a tiny model; ARGS="--model FOLDER --prompt Hello" from a published one
#   make train                          a small language model on Python's own sources, into out/train; ARGS="steps=2000" goes on
#   make temporaries                    memory of the layer on 8 x RTX 4090, compiled here: its own environment, about 5 GB
#   make kernels                        memory of whole layers on the GPU kernels, compiled here for cards that are not here
#   make inspect                        a host that is not here: does a model fit, and what runs beside the exchanges
#   make lint                           ruff and mypy
#   make clean                          removes the environment
#
# PYTHON picks the interpreter a new environment is made with, VENV its folder, JOBS the processes that tests run in.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

RUN := $(VENV)/bin/python

.PHONY: compare generate train test bench bench-gpu temporaries kernels inspect lint clean
.DELETE_ON_ERROR:

compare: $(VENV)/.installed-plot
	$(RUN) scripts/compare.py $(ARGS)

generate: $(VENV)/.installed-hub
	$(RUN) scripts/generate.py $(ARGS)

train: $(VENV)/.installed-plot
	$(RUN) scripts/train.py $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

bench: $(VENV)/.installed-plot
	$(RUN) scripts/bench_grouped.py $(ARGS)

bench-gpu:
	$(MAKE) --no-print-directory .venv-aot/.installed-aot VENV=.venv-aot
	.venv-aot/bin/python scripts/bench_gpu.py $(ARGS)

temporaries:
	$(MAKE) --no-print-directory .venv-aot/.installed-aot VENV=.venv-aot
	.venv-aot/bin/python scripts/temporaries.py $(ARGS)

kernels:
	$(MAKE) --no-print-directory .venv-aot/.installed-aot VENV=.venv-aot
	.venv-aot/bin/python scripts/aot_kernels.py $(ARGS)

inspect:
	$(MAKE) --no-print-directory .venv-aot/.installed-aot .venv-aot/.installed-plot VENV=.venv-aot
	.venv-aot/bin/python scripts/inspect_host.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV)

# The stamp of an extra: the package is installed in place with what that extra needs.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	@echo "installing jax_ep[$*] into $(VENV)"
	@$(RUN) -m pip install --quiet --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; make PYTHON=python3.12 works where that is installed")'
	@$(PYTHON) -m venv $(VENV)
