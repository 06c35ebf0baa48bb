# Every target does its own set-up: a machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
CONSTRAINTS ?= constraints.txt

# Tests start thousands of processes: each finds the bytecode of the package and need not compile it.
unexport PYTHONDONTWRITEBYTECODE

ENGINES = $(VENV)-engines
TRACKERS = $(VENV)-trackers
TRAINERS = $(VENV)-trainers
PEERS = $(VENV)-peers

# Whole files, in the order of their names: those of the last folders are short, so both cores end at nearly the same time.
TWO_CORES = -n 2 --dist loadfile --no-loadscope-reorder

# The pure core, and the tests that alone enter every line and branch of it. To measure the others takes twice their time.
CORE = tests/consistency tests/host tests/layout tests/membership tests/wire tests/net/test_sequence.py $(wildcard tests/test_*.py)
PURE = */paceline/consistency/*,*/paceline/layout/placement.py,*/paceline/host/start_clock.py,*/paceline/host/own_time.py,$\
  */paceline/membership/*,*/paceline/layout/interval_map.py,*/paceline/layout/local_merge.py,*/paceline/wire/*

# Processes that are killed, stopped, cut off, lied to, or change their speed, and whole jobs that take long: mostly waits.
FAULTS = tests/soak tests/launch/supervise/test_starting.py tests/cli/test_profiling.py tests/net/test_connections.py \
  tests/examples/test_train_mnist_devices.py $(patsubst %,tests/integration/test_%.py,auto_revised blame damage \
  ddp_hosts eavesdropper failures fork fuzz pool_resume regroup relayed saving_after_a_failure strangers tampering \
  worker_death)
# The same, with limits of a few seconds for noticing: nothing else runs beside them.
TIMED_FAULTS = $(patsubst %,tests/integration/test_%.py,hosts local_merge noticing)

.PHONY: help demo test test-torch test-faults test-noticing test-examples dist test-wheel test-ssh test-hvd test-engines \
  test-k8s test-trackers test-trainers test-browser test-c10d check check-style check-linux check-darwin check-win32 format docs fuzz \
  mutations oracle blame slow slow-peers busy soak pictures bench bench-unequal bench-shares bench-auto bench-regimes bench-plan clean

help:
	@echo "make demo   train LeNet on handwritten digits with 2 workers and 2 servers"
	@echo "make test   run the tests; those of the pure core enter every line and branch of it"
	@echo "make test-torch  the same with another PyTorch, in a venv of its own: TORCH=oldest, newest, 2.15.0, ..."
	@echo "make test-faults   processes that are killed, stopped or cut off, and a short soak (about 8 minutes)"
	@echo "make test-noticing  how many seconds it takes to notice and name them, with nothing beside it (about 4 minutes)"
	@echo "make test-examples  every example with every store on small real data (about an hour)"
	@echo "make test-hvd      every case of the Horovod interface, 1 to 4 processes, and 200 starts and ends (half an hour)"
	@echo "make dist   sdist and wheel in dist/, with a list of the packages that the wheel was tried with (some minutes)"
	@echo "make test-wheel    build the wheel, install it in an empty venv, run README's scripts (some minutes)"
	@echo "make test-ssh      launchers ssh, mpi and slurm on hosts with real ssh servers (root; about 5 minutes)"
	@echo "make test-engines  the same, and MNIST on every cluster manager that is installed (about 20 minutes)"
	@echo "make test-k8s      launcher k8s on a real Kubernetes, built once from Debian's source package (root; 5 minutes to build, 5 to test)"
	@echo "make test-trackers  figures in wandb, trackio, MLflow and OpenTelemetry; with Debian's prometheus, a real scrape"
	@echo "make test-browser  the page of a job in a real browser (Debian's chromium; about 3 minutes)"
	@echo "make test-trainers  accelerate, the Trainer of transformers and a GPT under --ddp, against torchrun (some minutes)"
	@echo "make test-c10d  PyTorch's own tests of process groups and DDP, over paceline and over Gloo (20 minutes)"
	@echo "make check  ruff, ruff format, mypy (Linux, macOS, Windows)"
	@echo "make docs   the site: guides, and a page for every public name, in build/html (half a minute)"
	@echo "make pictures  docs/images: the panel of a real job, and its page (chromium; a minute)"
	@echo "make bench  run the benchmarks (about 8 minutes) and write docs/benchmarks.md"
	@echo "make bench-regimes  dist_auto against every fixed mode, on simulated clusters (some minutes for each)"
	@echo "make bench-unequal  modes on 12 workers of three speeds, beside the simulator (about 25 minutes)"
	@echo "make bench-shares  samples/s of unlike workers in lock step, against what their own times allow (5 minutes)"
	@echo "make bench-auto  what dist_auto chooses on three kinds of real machines, beside other modes (about 45 minutes)"
	@echo "make bench-plan  the table and the picture of docs/planning.md (seconds)"
	@echo "make fuzz   one million mutated messages against a server, and 10,000 half-open connections"
	@echo "make mutations  change lines of the core, one at a time: a test must fail for each (about 5 minutes)"
	@echo "make oracle training loops against one process, 10 times each under faults (hours); ORACLE='--repeat 1' for less"
	@echo "make blame  200 jobs with a random fault each: is the right process named? (about an hour) BLAME='--jobs 20' for less"
	@echo "make slow   real jobs with one slow process each: is it named, with the right reason? (10 minutes, root)"
	@echo "make slow-peers  the same, beside TraceML and nvidia-resiliency-ext in plain DDP (half an hour)"
	@echo "make busy   100 good jobs and 50 failures with 20 threads a core that run (2 hours) BUSY='--jobs 8 --faults 4' for less"
	@echo "make soak   10 minutes of training in every mode: does memory grow? SOAK='--seconds 120' for less"
	@echo "make clean  remove what the targets above have made"

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("paceline needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/paceline launch -n 2 -s 2 -- $(BIN)/python examples/train_mnist.py \
	  --network lenet --kv-store dist_sync --lr 0.05

test: $(READY)
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest $(TWO_CORES) --cov=paceline --cov-branch --cov-report= $(CORE)
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing --include='$(PURE)'
	$(BIN)/python -m pytest $(TWO_CORES) $(patsubst %,--ignore=%,tests/engines $(FAULTS) $(TIMED_FAULTS) $(CORE))

# TORCH: oldest (that pyproject.toml allows), newest, or a version, as 2.15.0.
TORCH ?= newest
OLDEST_TORCH = $(shell sed -n 's/^  "torch>=\(.*\)",$$/\1/p' pyproject.toml).*
$(VENV)-$(TORCH).txt: pyproject.toml constraints.txt
	sed 's/^torch==.*/$(if $(TORCH:newest=),torch==$(TORCH:oldest=$(OLDEST_TORCH)))/' constraints.txt > $@

test-torch: $(VENV)-$(TORCH).txt
	$(MAKE) VENV=$(VENV)-$(TORCH) CONSTRAINTS=$(VENV)-$(TORCH).txt test

# A venv of its own, because Ray is heavy; what paceline needs comes from the other one.
$(ENGINES)/.ready: $(READY)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  ray kubernetes-validate kubeflow-trainer-api hatchling hatch-fancy-pypi-readme editables
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-paceline.pth
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Warnings are errors: a link that leads nowhere, a page that no other one leads to, a docstring that is not read well.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	PYTHONPATH=. $(BIN)/python -m docs.site.pages build/site
	rm -rf build/html
	PYTHONPATH=. $(BIN)/python -m sphinx -q --fail-on-warning --keep-going -c docs/site build/site build/html
	@echo "open build/html/index.html"

# The list of components is that of an environment with paceline and what it needs, and nothing else (CycloneDX, PEP 770).
dist: $(READY)
	rm -rf dist build/sbom
	$(PYTHON) -m venv --without-pip build/sbom
	$(BIN)/python -m pip --python build/sbom install --quiet --disable-pip-version-check -c constraints.txt .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	  --output-file build/sbom/paceline.cdx.json build/sbom/bin/python
	PACELINE_SBOM=$(abspath build/sbom/paceline.cdx.json) $(BIN)/python -m build

test-faults: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) $(FAULTS)

test-noticing: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) $(TIMED_FAULTS)

test-examples: $(READY)
	PACELINE_TEST_EXAMPLES=1 $(BIN)/python -m pytest --timeout 600 tests/examples

# What is tried is WHEEL, or a wheel built for it.
WHEEL ?= 1
test-wheel: $(READY)
	PACELINE_TEST_WHEEL=$(WHEEL) $(BIN)/python -m pytest --timeout 1200 tests/docs/test_wheel.py

test-ssh: $(READY)
	$(BIN)/python -m pytest $(TWO_CORES) -m "not slow" tests/engines

test-hvd: $(READY)
	PACELINE_TEST_HVD=1 PACELINE_TEST_ENDS=200 $(BIN)/python -m pytest --timeout 1800 tests/hvd

test-engines: $(READY) $(ENGINES)/.ready
	PACELINE_TEST_ENGINES_VENV=$(abspath $(ENGINES)) \
	  $(BIN)/python -m pytest --timeout 900 tests/engines tests/launch/engines/k8s

# A venv of its own, because the tools are heavy; what paceline needs comes from the other one. apt-get install prometheus
# has promtool and the server.
$(TRACKERS)/.ready: $(READY)
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  wandb trackio mlflow-skinny opentelemetry-exporter-otlp-proto-http
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(TRACKERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-paceline.pth
	touch $@

test-trackers: $(READY) $(TRACKERS)/.ready
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest tests/observe/test_tools.py tests/observe/test_prometheus.py tests/scheduler

# A venv of its own, because the trainers are heavy; what paceline needs, torch too, comes from the other one.
$(TRAINERS)/.ready: $(READY)
	$(PYTHON) -m venv $(TRAINERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-paceline.pth
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers accelerate
	touch $@

test-trainers: $(READY) $(TRAINERS)/.ready
	PYTHONPATH=src PACELINE_TEST_TRAINERS=1 $(TRAINERS)/bin/python -m pytest --timeout 900 tests/ddp/test_trainers.py

# apt-get install chromium has the browser.
test-browser: $(READY)
	PACELINE_TEST_BROWSER=1 $(BIN)/python -m pytest --timeout 600 -rs tests/browser

# expecttest is imported by PyTorch's tests.
test-c10d: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt expecttest
	$(BIN)/python -m tests.ddp.pytorch $(C10D)

check: $(READY) check-style check-linux check-darwin check-win32

check-style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-linux check-darwin check-win32: check-%: $(READY)
	$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$*

# Built once: about 4 minutes of two cores, into ~/.cache/paceline-k8s.
test-k8s: $(READY)
	$(BIN)/python -m tests.engines.kubernetes_build
	$(BIN)/python -m pytest --timeout 400 tests/engines/test_k8s.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(READY)
	PACELINE_FUZZ_MESSAGES=1000000 PACELINE_FUZZ_CONNECTIONS=10000 \
	  $(BIN)/python -m pytest tests/integration/test_fuzz.py tests/integration/test_strangers.py --timeout 900

mutations: $(READY)
	$(BIN)/python tests/mutations.py

oracle: $(READY)
	ORACLE_STEPS=50 $(BIN)/python -m tests.oracle $(ORACLE)

blame: $(READY)
	$(BIN)/python -m tests.blame --load 10 $(BLAME)

slow: $(READY)
	folder=$$(mktemp -d) && $(BIN)/python -m tests.observe.matrix --folder $$folder $(SLOW)

# A venv of its own, because nothing of these tools is used; what paceline needs, torch too, comes from the other one.
$(PEERS)/.ready: $(READY)
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-paceline.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  traceml-ai==0.5.0 nvidia-resiliency-ext==0.4.1 nvidia-cuda-cupti-cu12
	touch $@

slow-peers: $(READY) $(PEERS)/.ready
	folder=$$(mktemp -d) && $(BIN)/python -m tests.observe.matrix --folder $$folder --peers $(abspath $(PEERS)) $(SLOW)

busy: $(READY)
	$(BIN)/python -m tests.busy $(BUSY)

soak: $(READY)
	PACELINE_TEST_ROUNDS=10000 PACELINE_TEST_TRIALS=4 \
	  $(BIN)/python -m pytest --timeout 600 tests/observe/test_detector.py tests/observe/test_simulated.py
	$(BIN)/python -m tests.soak $(SOAK)

pictures: $(READY)
	$(BIN)/python docs/images/panel.py
	$(BIN)/python -m tests.browser.picture docs/images/page.png

bench: $(READY)
	$(BIN)/python -m benchmarks --report docs/benchmarks.md

bench-regimes: $(READY)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.regimes $(REGIMES)

# Jobs that were run are kept, so that a benchmark that was stopped goes on; make clean forgets them.
bench-unequal: $(READY)
	$(BIN)/python -m benchmarks.unequal --runs build/unequal-runs.jsonl --report docs/unequal-measured.md $(UNEQUAL)

bench-shares: $(READY)
	$(BIN)/python -m benchmarks.unequal.shares $(SHARES)

bench-auto: $(READY)
	$(BIN)/python -m benchmarks.unequal.auto --runs build/unequal-runs.jsonl $(AUTO)

bench-plan: $(READY)
	$(BIN)/python -m benchmarks.plan

clean:
	rm -rf $(VENV) $(wildcard $(VENV)-*) build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
