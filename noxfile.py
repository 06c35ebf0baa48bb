"""Suites beside `make test`: tests on real clusters and peers, soaks, benchmarks. `.venv/bin/nox -l` lists them.

`make check` once makes the virtual environment that nox is in. What follows `--` goes to the suite:
`.venv/bin/nox -s oracle -- --repeat 1`. A suite whose tools are heavy has a venv of its own, in `.nox/`. What paceline
needs, torch too, is found in the venv that nox is in.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PIP = ("--quiet", "--disable-pip-version-check", "-c", "constraints.txt")

nox.options.default_venv_backend = "none"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["examples"]


def call(session: nox.Session, *args: str, **env: str) -> None:
    """Run Python of the venv that nox is in."""
    session.run(sys.executable, *args, env=env, external=True)


def pytest(session: nox.Session, *args: str, **env: str) -> None:
    """Run tests in the venv that nox is in."""
    call(session, "-m", "pytest", *args, *session.posargs, **env)


def heavy(session: nox.Session, *packages: str) -> None:
    """Install packages into the session's own venv; the others are found in the venv that nox is in."""
    session.install(*PIP, *packages)
    found = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    (Path(str(found).strip()) / "zz-paceline.pth").write_text(sysconfig.get_path("purelib") + "\n")


# ---- tests ---------------------------------------------------------------------------------------------------------


@nox.session
def torch(session: nox.Session) -> None:
    """`make test` with another PyTorch, in a venv of its own: -- oldest, newest, 2.15.0, ..."""
    wanted = session.posargs[0] if session.posargs else "newest"
    if wanted == "oldest":
        [least] = re.findall(r'^  "torch>=(.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        wanted = f"{least}.*"
    line = "" if wanted == "newest" else f"torch=={wanted}"
    name = f"torch-{wanted.removesuffix('.*')}"
    constraints = ROOT / f".venv-{name}.txt"
    constraints.write_text(re.sub("^torch==.*", line, (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    session.run("make", f"VENV=.venv-{name}", f"CONSTRAINTS={constraints}", "test", external=True)


@nox.session
def examples(session: nox.Session) -> None:
    """Every example with every store on small real data (about an hour)."""
    pytest(session, "--timeout", "600", "tests/examples", PACELINE_TEST_EXAMPLES="1")


@nox.session
def hvd(session: nox.Session) -> None:
    """Every case of the Horovod interface, 1 to 4 processes, and 200 starts and ends (half an hour)."""
    pytest(session, "--timeout", "1800", "tests/hvd", PACELINE_TEST_HVD="1", PACELINE_TEST_ENDS="200")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it in an empty venv, run README's scripts (some minutes); -- FILE tries that wheel."""
    wanted = session.posargs[0] if session.posargs else "1"
    call(session, "-m", "pytest", "--timeout", "1200", "tests/docs/test_wheel.py", PACELINE_TEST_WHEEL=wanted)


@nox.session(venv_backend="venv")
def engines(session: nox.Session) -> None:
    """Launchers and MNIST on every cluster manager that is installed (root; about 20 minutes)."""
    tools = ("hatchling", "hatch-fancy-pypi-readme", "editables")
    heavy(session, "ray", "kubernetes-validate", "kubeflow-trainer-api", *tools)
    session.install("--quiet", "--no-deps", "--no-build-isolation", "-e", ".")
    where = str(Path(session.virtualenv.location).resolve())
    folders = ("tests/engines", "tests/launch/engines/k8s")
    pytest(session, "--timeout", "900", *folders, PACELINE_TEST_ENGINES_VENV=where)


@nox.session
def k8s(session: nox.Session) -> None:
    """Launcher k8s on a real Kubernetes, which is built once from Debian's source (root; 5 minutes, and 5 to build)."""
    call(session, "-m", "tests.engines.kubernetes_build")  # into ~/.cache/paceline-k8s
    pytest(session, "--timeout", "400", "tests/engines/test_k8s.py")


@nox.session(venv_backend="venv")
def trackers(session: nox.Session) -> None:
    """Figures in wandb, trackio, MLflow and OpenTelemetry; with Debian's prometheus, a real scrape."""
    heavy(session, "wandb", "trackio", "mlflow-skinny", "opentelemetry-exporter-otlp-proto-http")
    files = ("tests/observe/test_tools.py", "tests/observe/test_prometheus.py", "tests/scheduler")
    session.run("python", "-m", "pytest", *files, *session.posargs, env={"PYTHONPATH": "src"})


@nox.session(venv_backend="venv")
def trainers(session: nox.Session) -> None:
    """accelerate, the Trainer of transformers and a GPT under --ddp, against torchrun (some minutes)."""
    heavy(session, "transformers", "accelerate")
    env = {"PYTHONPATH": "src", "PACELINE_TEST_TRAINERS": "1"}
    session.run("python", "-m", "pytest", "--timeout", "900", "tests/ddp/test_trainers.py", *session.posargs, env=env)


@nox.session
def browser(session: nox.Session) -> None:
    """The page of a job in a real browser (Debian's chromium; about 3 minutes)."""
    pytest(session, "--timeout", "600", "-rs", "tests/browser", PACELINE_TEST_BROWSER="1")


@nox.session
def c10d(session: nox.Session) -> None:
    """PyTorch's own tests of process groups and DDP, over paceline and over Gloo (20 minutes)."""
    call(session, "-m", "pip", "install", *PIP, "expecttest")  # PyTorch's tests import it
    call(session, "-m", "tests.ddp.pytorch", *session.posargs)


# ---- soaks ---------------------------------------------------------------------------------------------------------


@nox.session
def fuzz(session: nox.Session) -> None:
    """One million mutated messages against a server, and 10,000 half-open connections."""
    env = {"PACELINE_FUZZ_MESSAGES": "1000000", "PACELINE_FUZZ_CONNECTIONS": "10000"}
    pytest(session, "tests/integration/test_fuzz.py", "tests/integration/test_strangers.py", "--timeout", "900", **env)


@nox.session
def mutations(session: nox.Session) -> None:
    """Change lines of the core, one at a time: a test must fail for each (about 5 minutes)."""
    call(session, "tests/mutations.py", *session.posargs)


@nox.session
def oracle(session: nox.Session) -> None:
    """Training loops against one process, 10 times each under faults (hours); -- --repeat 1 for less."""
    call(session, "-m", "tests.oracle", *session.posargs, ORACLE_STEPS="50")


@nox.session
def blame(session: nox.Session) -> None:
    """200 jobs with a random fault each: is the right process named? (about an hour) -- --jobs 20 for less."""
    call(session, "-m", "tests.blame", "--load", "10", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Real jobs with one slow process each: is it named, with the right reason? (root; 10 minutes)."""
    call(session, "-m", "tests.observe.matrix", "--folder", tempfile.mkdtemp(), *session.posargs)


@nox.session(name="slow-peers", venv_backend="venv")
def slow_peers(session: nox.Session) -> None:
    """The same, beside TraceML and nvidia-resiliency-ext in plain DDP (half an hour)."""
    heavy(session, "traceml-ai==0.5.0", "nvidia-resiliency-ext==0.4.1", "nvidia-cuda-cupti-cu12")
    where = str(Path(session.virtualenv.location).resolve())
    folder = tempfile.mkdtemp()
    call(session, "-m", "tests.observe.matrix", "--folder", folder, "--peers", where, *session.posargs)


@nox.session
def busy(session: nox.Session) -> None:
    """100 good jobs and 50 failures with 20 threads a core that run (2 hours); -- --jobs 8 --faults 4 for less."""
    call(session, "-m", "tests.busy", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """10 minutes of training in every mode: does memory grow? -- --seconds 120 for less."""
    files = ("tests/observe/test_detector.py", "tests/observe/test_simulated.py")
    env = {"PACELINE_TEST_ROUNDS": "10000", "PACELINE_TEST_TRIALS": "4"}
    call(session, "-m", "pytest", "--timeout", "600", *files, **env)
    call(session, "-m", "tests.soak", *session.posargs)


# ---- benchmarks, pictures, releases --------------------------------------------------------------------------------


@nox.session(name="bench-regimes")
def bench_regimes(session: nox.Session) -> None:
    """dist_auto against every fixed mode, on simulated clusters (some minutes for each)."""
    call(session, "-m", "benchmarks.regimes", *session.posargs, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


@nox.session(name="bench-unequal")
def bench_unequal(session: nox.Session) -> None:
    """Modes on 12 workers of three speeds, beside the simulator (about 25 minutes); a stopped benchmark goes on."""
    files = ("--runs", "build/unequal-runs.jsonl", "--report", "docs/unequal-measured.md")
    call(session, "-m", "benchmarks.unequal", *files, *session.posargs)


@nox.session(name="bench-shares")
def bench_shares(session: nox.Session) -> None:
    """Samples/s of workers of different speed in lock step, against what their own times allow (5 minutes)."""
    call(session, "-m", "benchmarks.unequal.shares", *session.posargs)


@nox.session(name="bench-auto")
def bench_auto(session: nox.Session) -> None:
    """What dist_auto chooses on three kinds of real machines, beside other modes (about 45 minutes)."""
    call(session, "-m", "benchmarks.unequal.auto", "--runs", "build/unequal-runs.jsonl", *session.posargs)


@nox.session(name="bench-plan")
def bench_plan(session: nox.Session) -> None:
    """The table and the picture of docs/planning.md (seconds)."""
    call(session, "-m", "benchmarks.plan", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """docs/images: the panel of a real job, and its page (chromium; a minute)."""
    call(session, "docs/images/panel.py")
    call(session, "-m", "tests.browser.picture", "docs/images/page.png")


@nox.session
def dist(session: nox.Session) -> None:
    """An sdist and a wheel in dist/, with a list of the packages that the wheel was tried with (some minutes)."""
    sbom = ROOT / "build/sbom"
    session.run("rm", "-rf", "dist", str(sbom), external=True)
    # An environment with paceline and what it needs, and nothing else (CycloneDX, PEP 770).
    call(session, "-m", "venv", "--without-pip", str(sbom))
    call(session, "-m", "pip", "--python", str(sbom), "install", *PIP, ".")
    call(session, "-m", "pip", "install", *PIP, "-e", ".[release]")
    made = ("--output-file", f"{sbom}/paceline.cdx.json", f"{sbom}/bin/python")
    kind = ("--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible")
    call(session, "-m", "cyclonedx_py", "environment", *kind, *made)
    call(session, "-m", "build", PACELINE_SBOM=f"{sbom}/paceline.cdx.json")
