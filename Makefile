# Train Through Failure. `make help` says what there is. Works with GNU make 3.81 (macOS) and any POSIX shell.

PYTHON3 ?= python3
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_FLAGS ?= -q
PYTEST_ARGS ?=
LAB_ARGS ?=
REPRODUCE_ARGS ?=

# VENV=path is somebody else's environment: used, completed when something is missing, never cleared or removed.
ifeq ($(strip $(VENV)),)
override VENV := .venv
OWN := yes
endif
PYTHON := $(VENV)/bin/python

# READY exists when set-up came to its end, and names the checkout that it was made for: an environment that was
# copied or is shared with another checkout would import the other one's course_lib. BEGUN exists while packages
# are being written, so that a set-up which was killed is not taken for a complete one.
READY := $(VENV)/.course-ready
BEGUN := $(VENV)/.course-begun
ifneq "$(shell test -x '$(PYTHON)' && cat '$(READY)' 2>/dev/null)" "$(CURDIR)"
.PHONY: $(READY)
endif

.PHONY: help demo reproduce lab test test-all lint unit unit-all built nbval nbval-all notebooks bench clean setup
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## this text
	@echo 'usage: make TARGET [VARIABLE=value …]'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'
	@echo
	@echo 'Every target but help and clean first makes .venv from pyproject.toml, and again when that file changes.'
	@echo
	@echo '  PYTHON3=PATH     the Python (3.10 or newer) that .venv is made with; default python3'
	@echo '  CPU=1            when .venv is made: take torch'"'"'s CPU build (a CUDA build is about 6 GB)'
	@echo '  VENV=DIR         use this environment (venv or conda) instead of .venv. Nothing is installed when it has'
	@echo '                   all packages in the right ranges and course_lib from here; else pip adds what is missing.'
	@echo '                   It is never cleared or removed. The path must not hold spaces.'
	@echo '  PYTEST_ARGS=…    more arguments for pytest, such as PYTEST_ARGS="-x -k snapshots" or "-n 2"'
	@echo '  LAB_ARGS=…       more arguments for JupyterLab, such as LAB_ARGS="--no-browser --port 9999"'
	@echo '  NOTEBOOK=04      for notebooks: only those whose names begin so'
	@echo '  BENCH="NAME …"   only these of scripts/bench'
	@echo '  PIP_FLAGS=       let pip show its progress'
	@echo
	@echo 'To start afresh, or to change between the CPU and the CUDA build: rm -rf .venv'

# --- set-up -----------------------------------------------------------------------------------------------------

setup: $(READY) ## make or update the environment, and do no more

# Reads the ranges out of pyproject.toml and compares them with what is installed; imports the large packages, since
# the metadata of a package that was half written can look complete. -I keeps the working directory off sys.path.
define SATISFIED
import pathlib, sys
from importlib.metadata import version
from packaging.requirements import Requirement
try:
    import tomllib
except ImportError:
    import tomli as tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for line in project["dependencies"] + extras["course"] + extras["test"]:
    wanted = Requirement(line)
    if not wanted.specifier.contains(version(wanted.name), prereleases=True):
        sys.exit(f"{line} is wanted, {version(wanted.name)} is installed")
import torch, torchvision, numpy, sklearn, matplotlib, jupyterlab, nbval, pytest, course_lib
if pathlib.Path(course_lib.__file__).resolve().parents[1] != pathlib.Path.cwd().resolve():
    sys.exit(f"course_lib is taken from {course_lib.__file__}")
endef
export SATISFIED

OLD := import sys; sys.exit(sys.version_info < (3, 10))
CPU_TORCH := sed -n 's/^ *"\(torch[a-z]*[<>=][^"]*\)".*/\1/p' pyproject.toml

$(READY): pyproject.toml
ifdef OWN
	@command -v '$(PYTHON3)' >/dev/null || \
		{ echo 'set-up: $(PYTHON3) not found; install Python 3.10 or newer, or say PYTHON3=/path/to/python3' >&2; exit 1; }
	@'$(PYTHON3)' -c '$(OLD)' || { echo "set-up: $(PYTHON3) is $$('$(PYTHON3)' -V 2>&1);" \
		'Python 3.10 or newer is needed; say PYTHON3=/path/to/one' >&2; exit 1; }
	@'$(PYTHON3)' -c 'import ensurepip, venv' 2>/dev/null || { echo 'set-up: $(PYTHON3) cannot make virtual' \
		'environments (no ensurepip); on Debian and Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; }
	@if test -e '$(BEGUN)' || ! '$(PYTHON)' -c '$(OLD)' 2>/dev/null; then \
		echo "set-up: making $(VENV) with $$('$(PYTHON3)' -V)"; \
		'$(PYTHON3)' -m venv --clear '$(VENV)' || \
			{ echo 'set-up failed: $(PYTHON3) could not make $(VENV), see above' >&2; exit 1; }; fi
else
	@'$(PYTHON)' -c '$(OLD)' || \
		{ echo 'set-up: VENV=$(VENV) has no bin/python of version 3.10 or newer; name an environment that exists' >&2; exit 1; }
endif
	@trap 'echo "set-up: interrupted" >&2; exit 130' INT TERM HUP; \
	'$(PYTHON)' -I -c "$$SATISFIED" >/dev/null 2>&1 || { \
		: > '$(BEGUN)'; \
		echo 'set-up: installing into $(VENV); this takes minutes and, with a CUDA build of torch, about 6 GB'; \
		{ test -z '$(CPU)' || { $(CPU_TORCH) > '$(VENV)/.course-torch' && '$(PYTHON)' -m pip install $(PIP_FLAGS) \
			--disable-pip-version-check --index-url '$(TORCH_CPU_INDEX)' -r '$(VENV)/.course-torch'; }; } && \
		'$(PYTHON)' -m pip install $(PIP_FLAGS) --disable-pip-version-check -e '.[course,test]'; \
		code=$$?; \
		if test $$code -ne 0; then \
			test $$code -ge 128 || rm -f '$(BEGUN)'; \
			echo "set-up failed: pip could not install the packages of pyproject.toml into $(VENV) (exit code $$code," \
				'see above). Say make again to go on.' >&2; exit 1; fi; \
		'$(PYTHON)' -I -c "$$SATISFIED" || { echo 'set-up failed: what pip installed into $(VENV) does not work, see above' >&2; exit 1; }; }
	@rm -f '$(BEGUN)'
	@echo '$(CURDIR)' > '$(READY)' || echo 'set-up: $(VENV) cannot be written, so it is checked at each make' >&2

# --- what a learner runs ----------------------------------------------------------------------------------------

demo: $(READY) ## train, kill a rank in the middle of a step, resume, compare with an uninterrupted run (90 s)
	@'$(PYTHON)' scripts/crash_and_resume.py --run-dir runs/demo

reproduce: $(READY) ## DATA=DIR: the series' ResNet-34 on CIFAR-10, interrupted and resumed; goes on where it was stopped
	@'$(PYTHON)' scripts/reproduce.py --data-root '$(DATA)' $(REPRODUCE_ARGS)

lab: $(READY) ## open the course in JupyterLab
	@start=notebooks/00_start_here.ipynb; test -e "$$start" || start=notebooks/; \
	exec '$(PYTHON)' -m jupyterlab --ServerApp.root_dir=. $(LAB_ARGS) "$$start"

# --- what a contributor runs ------------------------------------------------------------------------------------

test: lint unit built nbval ## lint, types, unit and integration tests, then every notebook (half an hour on two cores)

test-all: lint unit-all built nbval-all ## the rest: repetitions, long campaigns, solutions

lint: $(READY) ## ruff and mypy only
	@'$(PYTHON)' -m ruff check .
	@'$(PYTHON)' -m ruff format --check .
	@'$(PYTHON)' -m mypy

# Two at a time: most tests wait for processes to start. PYTEST_ARGS="-n 0" runs one after the other.
unit: $(READY) ## pytest without the slow tests
	@'$(PYTHON)' -m pytest -n 2 $(PYTEST_ARGS)

unit-all: $(READY)
	@'$(PYTHON)' -m pytest -m 'slow or not slow' $(PYTEST_ARGS)
	@for round in 2 3 4 5; do '$(PYTHON)' -m pytest -m matrix $(PYTEST_ARGS) || exit 1; done

# nbval bounds each cell itself and then says which one hung; pytest's own limit would only end the run.
NBVAL = if test -e "$$1"; then '$(PYTHON)' -m pytest --nbval --nbval-current-env --nbval-cell-timeout 120 \
	--timeout 0 $(PYTEST_ARGS) "$$@"; else echo 'no notebooks yet'; fi

built: $(READY)
	@'$(PYTHON)' scripts/build_notebooks.py --check

nbval: $(READY) ## run every notebook and compare its outputs
	@set -- notebooks/*.ipynb; $(NBVAL)

nbval-all: $(READY)
	@set -- notebooks/*.ipynb; test ! -d notebooks/solutions || set -- "$$@" notebooks/solutions/*.ipynb; $(NBVAL)

notebooks: $(READY) ## build, execute and write the notebooks from notebooks/src
	@'$(PYTHON)' scripts/build_notebooks.py $(NOTEBOOK)

bench: $(READY) ## run the benchmarks; each also writes runs/bench/NAME.json
	@mkdir -p runs/bench; status=0; \
	for file in $(if $(BENCH),$(BENCH:%=scripts/bench/%.py),scripts/bench/[!_]*.py); do \
		test -e "$$file" || { $(if $(BENCH),echo "there is no $$file" >&2; status=1,echo 'no benchmarks yet'); continue; }; \
		name=$$(basename "$$file" .py); echo "== $$name"; \
		'$(PYTHON)' "$$file" --json "runs/bench/$$name.json" || { echo "$$name failed" >&2; status=1; }; \
	done; exit $$status

clean: ## remove runs, caches and build products; .venv and data stay
	@rm -rf runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find course_lib scripts tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
