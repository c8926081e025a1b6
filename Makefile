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

.PHONY: setup demo test test-slow test-gpu lint prove e2e clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	test -z "$(OWN)" || realpath "$(OWN)" > $$($(RUN) -c "import site; print(site.getsitepackages()[0])")/own_torch.pth
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet $(PIP_OPTIONS) --editable ".[dev]"
	touch $@

demo: setup
	$(RUN) -m async_flowrl.main --config-name one_step_off

test: setup lint
	$(RUN) -m pytest

test-slow: setup
	$(RUN) -m pytest -m "slow and not gpu"

test-gpu: setup
	$(RUN) -m pytest -m gpu

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

prove: setup
	$(RUN) -m async_flowrl.prove

e2e: setup
	PYTHON=$(RUN) bash tests/e2e/run_one_step_off_tiny_qwen_image.sh

clean:
	rm -rf $(VENV) build dist
