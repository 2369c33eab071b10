# `make demo` and `make test` do all the set-up themselves; the second time they start at once.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
MXPROBE := $(VENV)/bin/mxprobe

.PHONY: demo test lint types clean

demo: $(STAMP)
	$(MXPROBE) demo

test: $(STAMP)
	$(VENV)/bin/pytest -q

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=.:kernels:reports $(VENV)/bin/lint-imports

types: $(STAMP)
	$(VENV)/bin/pyright

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[trl,duckdb]" --group dev
	touch $@

clean:
	rm -rf $(VENV)
