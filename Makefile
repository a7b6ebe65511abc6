# make demo: the engine at work on the embedded model.  make test: everything CI runs.
# Both make their own environment in .venv with pinned versions; nothing else is needed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo test lint clean

demo: .venv/ready
	$(BIN)/dsv4 generate --chat --thinking --temperature 0 --stats "Tell me a short story about a rabbit."
	$(BIN)/dsv4 generate --chat --thinking --temperature 0 --stats "What is 27 + 58?"

test: lint
	$(BIN)/python -m pytest -n $(JOBS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed and neither was found on the PATH"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
