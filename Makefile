# make demo: the engine at work on the embedded model.  make test: everything CI runs.
# make test-slow: before a release, what takes minutes.  make test-gpu: what needs a GPU.  make size: lines per package.
# All use the environment in .venv, made with pinned versions, for the demo the core alone; nothing else is needed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Modules are compiled once, when they are first imported: of those installed, few are.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
JOBS ?= 2

.PHONY: demo test tests test-slow test-gpu test-ray lint style types size clean

demo: .venv/core
	$(BIN)/dsv4 generate --chat --thinking --temperature 0 --stats "Tell me a short story about a rabbit."
	$(BIN)/dsv4 generate --chat --thinking --temperature 0 --stats "What is 27 + 58?"

# mypy uses one core for as long as a few tests take: both at once.
test:
	@$(MAKE) --no-print-directory --jobs=2 style
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests: .venv/dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: .venv/dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

# The longest come first, so each is handed out by itself.
test-gpu: .venv/dev
	$(BIN)/python -m pytest -n 8 --maxschedchunk 1 -m "gpu and not alone"
	$(BIN)/python -m pytest -m "gpu and alone"

test-ray: .venv/ray
	$(BIN)/python -m pytest -m ray tests/serve/test_ray.py tests/serve/test_ray_scale.py

lint: style types

style: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find dsv4 tests -name "*.cu" -o -name "*.cuh" -o -name "*.h" -o -name "*.cpp" | xargs $(BIN)/clang-format --dry-run --Werror

types: .venv/dev
	$(BIN)/mypy

# Lines and bytes per package, and the change of lines since the last tag, or since another revision: SINCE=main.
size:
	@$(if $(PYTHON),$(PYTHON),python3) tests/size.py $(SINCE)

.venv/pip:
	@test -n "$(PYTHON)" || { echo "error: no Python from 3.11 to 3.14 was found on the PATH; name one: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/core: .venv/pip requirements.txt pyproject.toml
	@echo "installing torch and what it needs into .venv: up to some GB, and minutes, without a word"
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# Most of what is beside the core. It needs nothing of it to be unpacked: with --jobs=2 both are at once.
.venv/pinned: .venv/pip requirements-dev.txt
	$(PIP) --no-deps $$(grep == requirements-dev.txt)
	@touch $@

.venv/dev: .venv/core .venv/pinned
	$(PIP) -r requirements-dev.txt
	@touch $@

.venv/ray: .venv/dev requirements-ray.txt
	$(PIP) -r requirements-ray.txt
	@touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
