# make demo   set up, then the whole method on embedded data
# make test   set up, then format, lint, types and tests

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test check format demo clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: check
	$(BIN)/python -m pytest --cov --cov-report=term

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: .venv/ready
	$(BIN)/stochbn demo

clean:
	rm -rf .venv demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
