# Two commands for a fresh machine with Python 3.10+, pip and make: `make demo`, and `make test`, which needs g++ too.
# `make demo` runs in the active environment if that has the package. Otherwise both commands make .venv here first. If
# the system's torch is new enough, .venv uses it. .venv cannot see the packages of another environment.
# pip installs the versions of constraints.txt.
# `make test` runs a part of the tests in which every feature occurs; most tests with CI set, all with DG_TEST_ALL set.

PYTHON ?= python3
VENV := .venv
PACKAGE := $(VENV)/.package
TOOLS := $(VENV)/.tools
TORCH_WILL_DO := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
CUDA_EXTRA := import torch; print("cu12" if (torch.version.cuda or "").startswith("12.") else "cu13")
EXTRA := $$($(VENV)/bin/python -W ignore -c '$(CUDA_EXTRA)')
INSTALL := $(VENV)/bin/python -m pip install --constraint constraints-$(EXTRA).txt
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
ACTIVE_HAS_IT := test -n "$(ACTIVE)" && "$(ACTIVE)/bin/python" -c \
	'from importlib.metadata import version as v; v("hopper-gemm"); v("torch")' 2>/dev/null

.PHONY: demo dev test wheels dist clean help

demo:
	@if $(ACTIVE_HAS_IT); then \
		echo "In the active environment, $(ACTIVE):" && "$(ACTIVE)/bin/python" -m deep_gemm demo; \
	else \
		$(MAKE) --no-print-directory $(PACKAGE) && $(VENV)/bin/python -m deep_gemm demo && \
		echo "To go on in this environment: source $(VENV)/bin/activate"; \
	fi

dev: $(TOOLS)
	@echo "The tools are in $(VENV): source $(VENV)/bin/activate"

test: $(TOOLS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@echo "The tests take $(if $(DG_TEST_ALL),more than 20,about $(if $(CI),12,6)) minutes on two cores."
	DG_JIT_STRICT=1 $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --durations 10

wheels: $(TOOLS)
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist --config-setting=--build-option=--plat-name=manylinux_2_17_$$(uname -m)
	CC=false $(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist dist/*.tar.gz
	ls dist/*-cp310-abi3-*.whl dist/*-py3-none-any.whl

dist: wheels
	rm -rf build/hub
	$(VENV)/bin/python -m lab ship kernels dist
	$(VENV)/bin/python -m lab ship hub build/hub

$(PACKAGE): pyproject.toml setup.py deep_gemm/core/replay.c constraints.txt constraints-cu12.txt constraints-cu13.txt Makefile
	@echo "Making a separate environment, $(VENV). pip shows its downloads."
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	$(VENV)/bin/python -c '$(TORCH_WILL_DO)' 2>/dev/null || { \
		$(PYTHON) -m venv --clear $(VENV) && $(VENV)/bin/python -m pip install torch==2.13.0; \
	}
	$(INSTALL) --editable ".[$(EXTRA)]"
	touch $@

$(TOOLS): $(PACKAGE) lab/releases.py tests/house/oldest_release.py
	$(INSTALL) --editable ".[dev,$(EXTRA)]"
	test "$(EXTRA)" = cu12 || $(INSTALL) --editable ".[old-nvrtc]"
	$(VENV)/bin/python -m lab releases --install "$(EXTRA)"
	$(VENV)/bin/python tests/house/oldest_release.py
	touch $@

help:
	@echo "make demo   run every product and layer, and check each; on a Hopper GPU show speed too"
	@echo "            (in the active environment if that has the package, otherwise in .venv, which it makes)"
	@echo "make dev    set up .venv with the tools, to run some tests by hand"
	@echo "make test   set up .venv with the tools, run ruff, mypy and the tests (needs g++; all tests with DG_TEST_ALL=1)"
	@echo "make wheels build the source distribution, a wheel for this kind of processor, and a wheel for any, in dist"
	@echo "make dist   build all files of a release, in dist and build/hub (docs/release.md)"
	@echo "make clean  remove .venv and the tools' caches and outputs"
	@echo "PYTHON=...  the interpreter that makes .venv (default: python3)"

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
