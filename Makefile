# Two commands for a fresh machine with Python 3.10+, pip, make and g++: `make demo` and `make test`.
# Both make .venv here first. Where the calling Python has a torch that will do, .venv uses it.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
TORCH_WILL_DO := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
CUDA_EXTRA := import torch; print("cu12" if (torch.version.cuda or "").startswith("12.") else "cu13")

.PHONY: demo test clean

demo: $(READY)
	$(VENV)/bin/python -m deep_gemm demo

test: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest

$(READY): pyproject.toml constraints.txt Makefile
	rm -rf $(VENV)
	if $(PYTHON) -c '$(TORCH_WILL_DO)' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet torch==2.13.0; \
	fi
	$(VENV)/bin/python -m pip install --quiet $(if $(CI),--constraint constraints.txt) \
		--editable ".[dev,$$($(VENV)/bin/python -c '$(CUDA_EXTRA)')]"
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
