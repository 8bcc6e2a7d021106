# make demo   set up, then the whole method on embedded data
# make test   set up, then format, lint, types and tests
# make ray    set up, then the tests that start a Ray cluster, in two minutes
# make fuzz   set up, then damaged and hostile files for five minutes; SECONDS=60 for another time
# make docs   set up, then the documentation as a site, site/index.html; a broken link fails
# make bench  set up, then speed and memory against everything else, in half an hour on an idle machine
# make soak   set up, then ten minutes of threads, interrupts and faults; anything wrong or left over fails

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test ray check fuzz format demo docs bench soak clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: check
	$(BIN)/python -m pytest -m "not ray" --numprocesses 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

ray: .venv/ready
	$(BIN)/python -m pytest -m ray tests/cli

# New files each time; a failure names its seed, which STOCHBN_FUZZ_SEED takes.
SECONDS ?= 300
fuzz: .venv/ready
	STOCHBN_FUZZ_SEED=$${STOCHBN_FUZZ_SEED:-$$(date +%s)000} STOCHBN_FUZZ_SECONDS=$(SECONDS) \
		$(BIN)/python -m pytest -s --tb=line tests/test_fuzz.py

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: .venv/ready
	$(BIN)/stochbn demo

# The pages lie beside README and results, as in the tree, so that links between them mean the same in both places.
docs: .venv/docs-ready
	rm -rf .docs && mkdir .docs
	cp -r README.md CHANGELOG.md CONTRIBUTING.md CITATION.cff LICENSE docs results .docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo Open site/index.html

.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

bench: .venv/bench/ready
	PYTHONPATH=.venv/bench $(BIN)/python -m benchmarks

# Apart from what the tests see, and without the dependencies that do not import (benchmarks/requirements.txt says which).
# Where it does not install, the benchmark runs without it and says so.
.venv/bench/ready: .venv/ready benchmarks/requirements.txt
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/bench \
		-r benchmarks/requirements.txt && touch $@

soak: .venv/ready
	$(BIN)/python -m benchmarks.soak --minutes 10

clean:
	rm -rf .venv .docs demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
