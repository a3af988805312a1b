# make demo   install into .venv and train the CPU example
# make test   install what the tests need too, and run them
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
EXAMPLE ?= examples/modular_sum_cpu/run.toml
PIP_INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo venv test lint clean

# Hiding the GPUs keeps the CPU example on CPUs wherever it is run.
demo: venv
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/vcpo train $(EXAMPLE)

venv: $(VENV)/.installed

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(PYTHON) is older than 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python setup.py constraints.txt
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.python setup.py constraints.txt
	$(PIP_INSTALL) -e '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
