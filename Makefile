# Each target works from a bare Python 3.11: what it needs is set up on first use and remembered in $(VENV)/.stamp-*.
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VERL_VENV ?= .venv-verl
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
OUT ?= runs/demo

# The root of the repository must not get on sys.path: its folders kernels/ and bench/ bear other packages' names.
export PYTHONSAFEPATH = 1
# Idle OpenMP threads that spin slow down everything else on a small machine.
export OMP_WAIT_POLICY = passive

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help demo test test-areal test-ray test-verl test-vllm lint typecheck clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(VENV)/.stamp-model  ## run the benchmark on a real small model and write a report
	$(bin)/longtail bench --out $(OUT)
	@echo "The report is in $(OUT)"

test: $(VENV)/.stamp-dev $(VENV)/.stamp-model  ## run all tests, the slow ones too
	@# Triton interprets or compiles, once decided for a process: three processes, and all of them run.
	@# The two of Triton run beside each other, each on one core.
	@# The others run one file on each core, with one thread each.
	@failed=0; OMP_NUM_THREADS=1 $(bin)/pytest tests -n auto --maxprocesses 4 --dist loadfile || failed=1; \
	    log=$$(mktemp); $(bin)/pytest tests/triton_compile >$$log 2>&1 & other=$$!; \
	    echo "pytest tests/triton"; $(bin)/pytest tests/triton || failed=1; \
	    wait $$other || failed=1; echo "pytest tests/triton_compile"; cat $$log; rm -f $$log; exit $$failed

test-areal: $(VENV)/.stamp-areal  ## run the server's test with AReaL's own client (400 MB more)
	OMP_NUM_THREADS=1 LONGTAIL_AREAL_PYTHON=$(abspath $(VENV)-areal/bin/python) \
	    $(bin)/pytest tests/trainer_adapter/server/test_areal.py

test-ray: $(VENV)/.stamp-dev  ## run the tests of engines as Ray actors, which want the machine for themselves
	OMP_NUM_THREADS=1 $(bin)/pytest tests/ray -m "not slow"

test-verl: $(VERL_VENV)/.stamp  ## run the tests of the plugin for verl, in an environment of its own
	$(VERL_VENV)/bin/pytest tests/verl

# Those that start processes come last, in one of their own, so that what fails there fails by itself.
vllm_starts := $(addprefix tests/vllm/test_,pool.py process_core.py serve.py train.py trl.py weight_transfer.py)

test-vllm: $(VLLM_VENV)/.stamp  ## run the tests of the vLLM engine on vLLM's CPU build, in an environment of its own
	@# Intel's OpenMP first, one thread: ten times the speed. In one process: `import vllm` takes long.
	@export LD_PRELOAD=$(abspath $(VLLM_VENV))/lib/libiomp5.so OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	    VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR; \
	    unset OMP_WAIT_POLICY; failed=0; \
	    $(VLLM_VENV)/bin/pytest -m "not slow" tests/vllm $(addprefix --ignore=,$(vllm_starts)) || failed=1; \
	    $(VLLM_VENV)/bin/pytest -m "not slow" $(vllm_starts) || failed=1; exit $$failed

lint: $(VENV)/.stamp-dev  ## check style and imports
	$(bin)/ruff check .

typecheck: $(VENV)/.stamp-dev  ## check types
	$(bin)/mypy

clean:  ## remove the environment and what tools left behind; keeps runs/ and the models' cache
	rm -rf $(VENV) $(VENV)-areal $(VERL_VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "longtail needs Python 3.11 or newer, PYTHON=$(PYTHON) is not; try: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(pip) install -qq --upgrade pip
	@touch $@

$(VENV)/.stamp-run: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	$(pip) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	$(pip) install -qq -c constraints.txt -e '.[dev,trl,lora,rewards,serve,ray]'
	@# The sandbox for programs; where it cannot be had its tests are skipped, and say why.
	@command -v bwrap >/dev/null || apt-get install -qq -y bubblewrap >/dev/null 2>&1 || \
	    echo 'bubblewrap is missing (apt-get install bubblewrap): the tests of the sandbox are skipped'
	@touch $@ $(VENV)/.stamp-run

# vLLM excludes versions that longtail is tested with: all versions are of that environment, longtail adds none.
$(VLLM_VENV)/.stamp: tests/vllm/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps -e .
	@touch $@

# verl excludes the transformers that longtail is tested with: all versions are of that environment, longtail adds none.
$(VERL_VENV)/.stamp: tests/verl/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq -r tests/verl/requirements.txt
	$(VERL_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps -e .
	@touch $@

$(VENV)/.stamp-model: | $(VENV)/.stamp-run
	$(bin)/longtail model smollm2-135m
	@touch $@

# AReaL's client has an environment of its own, which sees the packages of ours (torch, transformers) behind its own.
$(VENV)/.stamp-areal: tests/trainer_adapter/server/areal-requirements.txt | $(VENV)/.stamp-dev
	$(PYTHON) -m venv $(VENV)-areal
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	    $(bin)/python -c "$$purelib" > "$$($(VENV)-areal/bin/python -c "$$purelib")/longtail.pth"
	$(VENV)-areal/bin/python -m pip --disable-pip-version-check --no-input install -qq -r $<
	$(VENV)-areal/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-deps areal==1.0.4
	@touch $@
