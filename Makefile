# Every target does its own set-up: a machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
CONSTRAINTS ?= constraints.txt

# Tests start thousands of processes: each finds the bytecode of the package and need not compile it.
unexport PYTHONDONTWRITEBYTECODE

# Whole files, in the order of their names: those of the last folders are short, so both cores end at nearly the same time.
TWO_CORES = -n 2 --dist loadfile --no-loadscope-reorder

# The pure core, and the tests that alone enter every line and branch of it. To measure the others takes twice their time.
CORE = tests/consistency tests/host tests/layout tests/membership tests/wire tests/net/test_sequence.py $(wildcard tests/test_*.py)
PURE = */paceline/consistency/*,*/paceline/layout/placement.py,*/paceline/host/start_clock.py,*/paceline/host/own_time.py,*/paceline/host/plain_text.py,$\
  */paceline/membership/*,*/paceline/layout/interval_map.py,*/paceline/layout/local_merge.py,*/paceline/wire/*

# Processes that are killed, stopped, cut off, lied to, or change their speed, and whole jobs that take long: mostly waits.
FAULTS = tests/soak tests/launch/supervise/test_starting.py tests/cli/test_profiling.py tests/net/test_connections.py \
  tests/examples/test_train_mnist_devices.py $(patsubst %,tests/integration/test_%.py,auto_revised blame damage \
  ddp_hosts eavesdropper failures fork fuzz holders pool_resume regroup relayed saving_after_a_failure strangers tampering \
  worker_death)
# The same, with limits of a few seconds for noticing: nothing else runs beside them.
TIMED_FAULTS = $(patsubst %,tests/integration/test_%.py,hosts local_merge noticing)

.PHONY: help demo quick test test-faults test-noticing test-ssh check check-style check-linux check-darwin \
  format docs bench clean

help:
	@echo "make demo   train LeNet on handwritten digits with 2 workers and 2 servers"
	@echo "make quick  tests of what has no processes: the rule, membership, messages, speeds, optimizers (half a minute)"
	@echo "make test   run the tests; those of the pure core enter every line and branch of it"
	@echo "make test-faults   processes that are killed, stopped or cut off, and a short soak (about 8 minutes)"
	@echo "make test-noticing  how many seconds it takes to notice and name them, with nothing beside it (about 4 minutes)"
	@echo "make test-ssh  launchers ssh, mpi and slurm on hosts with real ssh servers (root; about 5 minutes)"
	@echo "make check  ruff, ruff format, mypy (Linux, macOS)"
	@echo "make format ruff mends what it can"
	@echo "make docs   the site: guides, and a page for every public name, in build/html (half a minute)"
	@echo "make bench  run the benchmarks (about 8 minutes) and write docs/benchmarks.md"
	@echo "make clean  remove what the targets above have made"
	@echo "other suites (clusters, peers, soaks, benchmarks, releases): $(BIN)/nox -l, $(BIN)/nox -s NAME"

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("paceline needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/paceline launch -n 2 -s 2 -- $(BIN)/python examples/train_mnist.py \
	  --network lenet --kv-store dist_sync --lr 0.05

quick: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) $(CORE) tests/hetero tests/updaters

test: $(READY)
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest $(TWO_CORES) --cov=paceline --cov-branch --cov-report= $(CORE)
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing --include='$(PURE)'
	$(BIN)/python -m pytest $(TWO_CORES) $(patsubst %,--ignore=%,tests/engines $(FAULTS) $(TIMED_FAULTS) $(CORE))

test-faults: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) $(FAULTS)

test-noticing: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) $(TIMED_FAULTS)

test-ssh: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) -m "not slow" tests/engines

check: $(READY) check-style check-linux check-darwin

check-style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-linux check-darwin: check-%: $(READY)
	$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$*

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings are errors: a link that leads nowhere, a page that no other one leads to, a docstring that is not read well.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	PYTHONPATH=. $(BIN)/python -m docs.site.pages build/site
	rm -rf build/html
	PYTHONPATH=. $(BIN)/python -m sphinx -q --fail-on-warning --keep-going -c docs/site build/site build/html
	@echo "open build/html/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks --report docs/benchmarks.md

clean:
	rm -rf $(VENV) $(wildcard $(VENV)-*) build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
