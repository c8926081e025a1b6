# Two commands matter: `make demo` sets everything up and trains; `make test` sets everything up and runs the tests.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

# Where the given Python already has a torch that sees a GPU, the environment uses that one; elsewhere constraints.txt
# names the version that was tested.
OWN := $(shell $(PYTHON) -c "import torch; print(torch.__path__[0] + '/..' if torch.cuda.is_available() else '')" 2>/dev/null)
ifeq ($(OWN),)
PIP_OPTIONS := --constraint constraints.txt
endif

.PHONY: setup environments demo test pytest test-quick test-extended test-nodes test-slow test-gpu test-pretend-gpu test-pretend-gpu-slow test-vllm-omni test-vllm-omni-slow test-vlm-server test-oldest docs docs-serve docs-release lint size prove e2e clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	test -z "$(OWN)" || realpath "$(OWN)" > $$($(RUN) -c "import site; print(site.getsitepackages()[0])")/own_torch.pth
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet $(PIP_OPTIONS) --editable ".[dev]"
	touch $@

# Words become legible: a small Qwen-Image that writes badly, a quarter of the recipe of docs/glyphs.md, "Legible and vivid".
demo: setup
	$(RUN) -m async_flowrl.main --config-name one_step_off experiment=glyphs_vivid total_steps=60 name=demo

# What Python and pytest compile is kept: a test run starts some hundred processes, each of which would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in the order of conftest.py, lint beside them. Those that start clusters, fork ranks or time the CPU stay in
# one process each (the lanes of conftest.py) and wait, so there are two processes more than there are cores.
test: setup
	$(MAKE) --jobs=2 lint pytest

IN_PROCESSES := -n $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --dist loadgroup --no-loadscope-reorder

# The lanes of GPUs and of the vllm_omni engine start many processes themselves.
IN_TWO_PROCESSES := -n 2 --dist loadgroup --no-loadscope-reorder

pytest: setup
	$(RUN) -m pytest $(IN_PROCESSES) $(if $(EXTENDED),-m "$(ANYWHERE)")

# More cases, families and recipes of what `make test` covers, and the planted faults: 3 % of the branches are reached by
# these alone. `make test EXTENDED=yes` runs both.
test-extended: setup
	$(RUN) -m pytest $(IN_PROCESSES) -m "extended and $(ANYWHERE)"

# What needs neither a GPU nor root nor minutes.
ANYWHERE := not (slow or gpu or pretend_gpu or nodes)

# Between two edits: what changed is linted, and what everything rests on is tested, most of it in virtual time; without `extended`.
CHANGED = $(shell git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py')
CORE := tests/unit/algorithms tests/unit/config tests/unit/data $(wildcard tests/unit/test_*.py)

test-quick: setup
	$(if $(CHANGED),$(VENV)/bin/ruff check $(CHANGED))
	$(if $(CHANGED),$(VENV)/bin/ruff format --check $(CHANGED))
	$(if $(CHANGED),$(VENV)/bin/codespell $(CHANGED))
	$(RUN) -m pytest -n auto --dist loadgroup --no-loadscope-reorder $(CORE)

# A run over several nodes, which Linux namespaces pretend (tests/nodes): as root; elsewhere skipped, in one sentence.
test-nodes: setup
	$(RUN) -m pytest -m "nodes and not slow" tests/nodes

test-slow: setup
	$(RUN) -m pytest -m "slow and not gpu and not pretend_gpu"
	$(MAKE) test-pretend-gpu-slow test-vllm-omni-slow

test-gpu: setup
	$(RUN) -m pytest -m gpu

# On pretended GPUs (tests/pretend_gpu/README.md): what is marked gpu, but timing and CUDA graphs; what asks for pretended
# ones; in the slow tier also the unit tests of what runs on a device.
ON_DEVICE := $(RUN) -m tests.pretend_gpu.launch -m pytest -p tests.pretend_gpu.plugin
OF_DEVICES := tests/unit/training tests/unit/rollout tests/unit/checkpoint_engine

# Transport pynccl is made of cupy, which imports without a GPU; whoever rehearses it gets it in a folder of its own.
PRETEND_CUPY := build/pretend_cupy

$(PRETEND_CUPY)/.installed: $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PRETEND_CUPY) \
	  "cupy-cuda13x>=14" cuda-pathfinder
	touch $@

test-pretend-gpu: setup $(PRETEND_CUPY)/.installed
	$(ON_DEVICE) $(IN_TWO_PROCESSES) -m "(gpu or pretend_gpu) and not real_gpu and not slow" tests/gpu tests/pretend_gpu $(OF_DEVICES)

test-pretend-gpu-slow: setup $(PRETEND_CUPY)/.installed
	$(ON_DEVICE) -m "(gpu or pretend_gpu) and not real_gpu and slow" tests/gpu tests/pretend_gpu $(OF_DEVICES)
	$(ON_DEVICE) -m "$(ANYWHERE)" $(OF_DEVICES)

# The rollout engine vllm_omni pins older diffusers and transformers, so its tests have an environment of their own. vllm
# comes without its dependencies, most of which need a GPU; tests/vllm_omni/requirements.txt names the others. PyPI's
# torchaudio and torchcodec are builds for CUDA and don't load beside a CPU torch.
VLLM_OMNI_VENV ?= .venv-vllm-omni
VLLM_OMNI_RUN := $(VLLM_OMNI_VENV)/bin/python
VLLM_OMNI_SUPPORT := $(wildcard tests/vllm_omni/support/*.* tests/vllm_omni/support/*/*.py)
INSTALL := -m pip install --quiet --disable-pip-version-check

# Without the engine every test of the lane is skipped, and pytest ends with an error where it ran none.
test-vllm-omni: $(VLLM_OMNI_VENV)/.installed
	HF_HUB_OFFLINE=1 $(VLLM_OMNI_RUN) -m pytest $(IN_TWO_PROCESSES) tests/vllm_omni

test-vllm-omni-slow: $(VLLM_OMNI_VENV)/.installed
	HF_HUB_OFFLINE=1 $(VLLM_OMNI_RUN) -m pytest -m slow tests/vllm_omni

$(VLLM_OMNI_VENV)/.installed: pyproject.toml constraints-vllm-omni.txt tests/vllm_omni/requirements.txt $(VLLM_OMNI_SUPPORT)
	$(PYTHON) -m venv $(VLLM_OMNI_VENV)
	$(VLLM_OMNI_RUN) $(INSTALL) --upgrade pip
	$(VLLM_OMNI_RUN) $(INSTALL) --no-deps --constraint constraints-vllm-omni.txt vllm
	$(VLLM_OMNI_RUN) $(INSTALL) --constraint constraints-vllm-omni.txt --requirement tests/vllm_omni/requirements.txt \
	  --editable ".[dev]"
	$(VLLM_OMNI_RUN) -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_OMNI_RUN) $(INSTALL) --no-deps --force-reinstall tests/vllm_omni/support
	touch $@

# The reward vlm_judge at vllm's own server, with a tiny model on a CPU; the server has an environment of its own.
VLM_SERVER_VENV ?= .venv-vlm-server

test-vlm-server: setup $(VLM_SERVER_VENV)/.installed
	VLM_SERVER_VENV=$(abspath $(VLM_SERVER_VENV)) $(RUN) -m pytest -m slow tests/vlm_server

$(VLM_SERVER_VENV)/.installed: tests/vlm_server/requirements.txt tests/vlm_server/metadata/pyproject.toml $(VLLM_OMNI_SUPPORT)
	$(PYTHON) -m venv $(VLM_SERVER_VENV)
	$(VLM_SERVER_VENV)/bin/python $(INSTALL) --upgrade pip
	$(VLM_SERVER_VENV)/bin/python $(INSTALL) --requirement tests/vlm_server/requirements.txt
	$(VLM_SERVER_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLM_SERVER_VENV)/bin/python $(INSTALL) --no-deps --force-reinstall tests/vllm_omni/support tests/vlm_server/metadata
	touch $@

# The unit tests with the oldest packages that pyproject.toml allows, by hand at a release and when a bound moves;
# docs/tested.md has the last result. torch is the tested one; OLDEST_TORCH=2.11.0 takes the oldest, several GB from PyPI.
OLDEST_VENV ?= .venv-oldest
OLDEST_TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

test-oldest: setup
	mkdir -p build
	echo torch==$(OLDEST_TORCH) > build/oldest_torch.txt
	$(VENV)/bin/uv pip compile --quiet --resolution lowest-direct --extra dev --constraint build/oldest_torch.txt \
	  pyproject.toml --python $(RUN) --output-file build/oldest.txt
	$(PYTHON) -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python $(INSTALL) --no-deps --requirement build/oldest.txt
	$(OLDEST_VENV)/bin/python $(INSTALL) --no-deps --editable .
	$(OLDEST_VENV)/bin/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadgroup -m "$(ANYWHERE)" tests/unit

# The documentation site, into build/site; what documents link to must be there.
DOCS_VENV ?= .venv-docs

# Formulas are typeset by KaTeX, which comes from npm and is part of the site.
export KATEX = $(abspath $(DOCS_VENV))/node_modules/katex/dist

docs: $(DOCS_VENV)/.installed $(KATEX)/katex.min.js
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

docs-serve: $(DOCS_VENV)/.installed $(KATEX)/katex.min.js
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

# The site of this version beside those of earlier ones, on the branch gh-pages of this repository; nothing is pushed.
DOCS_VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

MIKE := NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" mike

docs-release: docs
	$(MIKE) deploy --update-aliases $(DOCS_VERSION) latest
	$(MIKE) set-default latest

$(DOCS_VENV)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) --requirement docs/requirements.txt
	touch $@

$(KATEX)/katex.min.js: | $(DOCS_VENV)/.installed
	npm install --silent --no-audit --no-fund --prefix $(DOCS_VENV) katex@0.19

# What test-vllm-omni and docs install besides, for continuous integration; beside `make setup`.
environments: $(VLLM_OMNI_VENV)/.installed $(DOCS_VENV)/.installed $(KATEX)/katex.min.js

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(RUN) -m benchmarks.size --check

# Code lines, files and docstrings of each room against the budgets of pyproject.toml, and the files on a ticket's way.
size: setup
	$(RUN) -m benchmarks.size --way

prove: setup
	$(RUN) -m benchmarks.prove

e2e: setup
	PYTHON=$(RUN) bash tests/e2e/run_one_step_off_tiny_qwen_image.sh

clean:
	rm -rf $(VENV) $(VLLM_OMNI_VENV) $(VLM_SERVER_VENV) $(OLDEST_VENV) $(DOCS_VENV) build dist
