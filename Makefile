# make demo    sets up .venv for runs and trains: two ranks, a tiny Mistral, LoRA; ends with a summary and a report
# make setup   sets up .venv with everything, also what tests and checks need
# make compare all strategies on equal work on two ranks, each proved before its time counts
# make test    sets up .venv and runs the usual tests, on gloo ranks and on a cluster in a box too
# make test-dist  those of them that run on gloo ranks
# make test-all  all tests, the full matrices too (hours);  make test-all PART="unit chaos"  parts of it, see PARTS
# make chaos   random faults with fixed seeds into runs that start again by themselves (hours);  make chaos SHARD=1/4
# make gpu     proves it on one GPU, in at most 28 minutes, without network;  make gpu STAGE="correctness speed model"
#              AGAIN=1 repeats what is recorded, DEVICE=cpu rehearses with tiny sizes, RESULTS=DIR writes elsewhere
# make gpu-wheels HAVE=FREEZE FOR=3.12  downloads into .wheels what an offline machine lacks (see benchmarks/README.md)
# make site    builds the documentation site in build/site; a broken link fails
# JOBS=4       tests at a time
# TORCH=2.12.0 another torch than the tested one;  PYTHON=python3.12 another interpreter

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
TORCH ?= 2.13.0
STAMP := $(VENV)/.allranks-ready
DEMO_STAMP := $(VENV)/.allranks-demo
PYTEST := $(VENV)/bin/python -m pytest

# Container images often set it: without compiled files pytest rewrites every test module anew in each of its processes.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: site slurm help setup demo compare test test-dist test-all chaos gpu gpu-wheels lint bench clean

help:
	@sed -n 's/^# \(make.*\)/\1/p;s/^# \( *AGAIN.*\)/\1/p;s/^# \(TORCH.*\)/\1/p;s/^# \(JOBS.*\)/\1/p' Makefile

setup: $(STAMP)

$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash scripts/setup.sh $(if $(filter %-demo,$@),demo)

demo: $(DEMO_STAMP)
	@$(VENV)/bin/allranks run examples/demo.yaml

compare: setup
	@$(VENV)/bin/allranks compare examples/compare-tiny.yaml

# Tests at a time, on two cores: some wait rather than work, but ranks and launchers of too many hinder each other.
# A machine may be too busy for one of them beside the others.
JOBS ?= 4
PARALLEL = --forks $(JOBS)

USUAL := -m "not full and not docs"

test: setup slurm
	@code=0; timeout 3000 $(PYTEST) -q $(PARALLEL) $(USUAL) tests || code=$$?; \
	  if [ $$code -eq 1 ]; then \
	    echo "test: what failed beside other tests runs once more, alone; only what fails again counts"; \
	    code=0; timeout 1200 $(PYTEST) -q $(USUAL) --last-failed --last-failed-no-failures none tests || code=$$?; \
	  fi; exit $$code

test-dist: setup
	@timeout 3600 $(PYTEST) -q $(PARALLEL) $(USUAL) tests/dist

# Each part takes less than two hours on two cores, and is recorded by itself.
PARTS := unit static dist-1 dist-2 overload reference cluster chaos security
PART ?= $(PARTS)
unit := tests/unit
static := tests/golden tests/lint
dist-1 := $(sort $(wildcard tests/dist/test_[a-k]*.py))
overload := tests/dist/test_overload.py
dist-2 := $(filter-out $(dist-1) $(overload),$(sort $(wildcard tests/dist/test_*.py)))
reference := tests/reference
cluster := tests/cluster
chaos := tests/chaos
security := tests/security

# Each of these tests loads the machine by itself; full matrices start up to four ranks that compute all the time.
part-overload: JOBS = 1
part-dist-1 part-dist-2 part-cluster: JOBS = 3

test-all: setup slurm $(addprefix part-,$(PART))
	@exit $$(cat $(addprefix .test-all/,$(addsuffix .code,$(PART))) | sort -n | tail -1)

part-%: setup
	@$(if $($*),,echo "test-all: there is no part $*; parts are $(PARTS)"; exit 2)
	@mkdir -p .test-all; rm -f .test-all/$*.xml .test-all/$*.again.xml; code=0; echo "test-all: $*"; \
	  TEST_ALL=1 timeout 7200 $(PYTEST) -q $(PARALLEL) --timeout 900 $($*) --junitxml=.test-all/$*.xml || code=$$?; \
	  if [ $$code -eq 1 ]; then \
	    echo "test-all: what failed beside other tests of $* runs once more, alone; only what fails again counts"; \
	    code=0; TEST_ALL=1 timeout 3600 $(PYTEST) -q --timeout 900 --last-failed --last-failed-no-failures none \
	      $($*) --junitxml=.test-all/$*.again.xml || code=$$?; \
	  fi; echo $$code > .test-all/$*.code
	@$(VENV)/bin/python scripts/record_tests.py $* .test-all/$*.xml benchmarks/results/test_all.json || true

# Finished seeds are kept in .chaos and skipped.
SHARD ?= 1/1
chaos: setup slurm
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)" $(VENV)/bin/python -m tests.chaos --shard $(SHARD)

# The cluster in a box needs Slurm's own programs; where they cannot be installed its tests are skipped, and say so.
slurm:
	@bash scripts/install-slurm.sh --check >/dev/null 2>&1 || bash scripts/install-slurm.sh --accounting || true

# Not after setup, which needs a network: without $(VENV) this is the Python with torch, and packages that it lacks come
# from .wheels.
DEVICE ?= cuda
GPU_PYTHON := $(or $(wildcard $(VENV)/bin/python),$(PYTHON))
WHEELS := $(if $(wildcard $(VENV)/bin/python),,$(wildcard .wheels/*.whl))
gpu: $(if $(WHEELS),.wheels/site/.ready)
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/.wheels/site$(if $(PYTHONPATH),:$(PYTHONPATH))" \
	  $(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE) \
	  $(if $(STAGE),--stage $(STAGE)) $(if $(AGAIN),--again) $(if $(RESULTS),--results "$(RESULTS)")

.wheels/site/.ready: $(WHEELS)
	@rm -rf .wheels/site
	@$(GPU_PYTHON) -m pip install -q --disable-pip-version-check --no-index --no-deps --target .wheels/site $(WHEELS)
	@touch $@

gpu-wheels: setup
	@$(VENV)/bin/python scripts/gpu_wheels.py $(if $(HAVE),--have "$(HAVE)") $(if $(FOR),--python $(FOR))

lint: setup
	@$(VENV)/bin/ruff check src tests benchmarks scripts
	@$(VENV)/bin/ruff format --check src tests benchmarks scripts
	@$(VENV)/bin/pyright
	@$(VENV)/bin/lint-imports
	@$(PYTEST) -q -m docs tests

# In an environment of its own: the site needs neither torch nor the tests' packages.
site: build/site-env/.ready
	@NO_MKDOCS_2_WARNING=1 build/site-env/bin/python -m mkdocs build --strict 2>&1 | grep -v "^INFO"; \
	  exit $${PIPESTATUS[0]}
	@echo "site: build/site/index.html"

build/site-env/.ready: pyproject.toml constraints.txt
	@"$(PYTHON)" -m venv build/site-env
	@build/site-env/bin/pip install -q --disable-pip-version-check -c constraints.txt ".[site]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
