"""The documents are true: their code runs, their tables are complete."""

import dataclasses
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from paceline.cli.app import main
from paceline.config import ALIASES, Settings
from paceline.kvstore.checkpoint.tensor_file import read
from tests.clusters import programs
from tests.docs.pages import ROOT, TEXTS, blocks, rows


def run(script: str, launch: str, folder: Path) -> str:
    """Return the output of a script, alone or under ``paceline launch`` with these options; processes are forked."""
    (folder / "train.py").write_text(script)
    words = ["-m", "paceline", "launch", *launch.split(), "--", sys.executable] if launch else []
    done = programs.run([*words, "train.py"], cwd=folder, timeout_s=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_script_trains_under_the_launcher(tmp_path: Path) -> None:
    shown = run(blocks("README.md", "python")[0], "-n 2 -s 1", tmp_path)
    first, _, last = [float(one) for one in re.findall(r"epoch \d: loss ([\d.]+)", shown)]
    assert last < first


def test_readme_script_runs_alone_with_the_local_store(tmp_path: Path) -> None:
    script = blocks("README.md", "python")[0].replace('"dist_sync"', '"local"')
    assert "epoch 2" in run(script, "", tmp_path)


def test_horovod_script_runs_on_two_ranks(tmp_path: Path) -> None:
    [script] = blocks("docs/horovod.md", "python")
    assert run(script, "-n 2 -s 0", tmp_path).count("torch.Size([2, 10])") == 2


def test_script_with_local_steps_trains_on_two_workers(tmp_path: Path) -> None:
    script = blocks("docs/slow-networks.md", "python")[0]
    losses = [float(one) for one in re.findall(r"epoch \d: loss ([\d.]+)", run(script, "-n 2 -s 1", tmp_path))]
    assert len(losses) == 16
    assert max(losses[-2:]) < 0.5 * min(losses[:2])


def test_script_of_a_worker_that_leaves_ends_well_on_all_workers(tmp_path: Path) -> None:
    [script] = blocks("docs/elastic.md", "python")
    told = "        if store.rank == 1 and not store.leaving:\n            paceline.notice('the night is over')\n"
    before = "        if store.leaving:\n"
    assert before in script
    run(script.replace(before, told + before), "-n 2 -s 1", tmp_path)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["worker-1.pt"]


def test_job_file_makes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [text] = blocks("docs/launching.md", "toml")
    Path("job.toml").write_text(text)
    Path("hosts").write_text("h1\nh2\nh3\n")
    assert main(["launch", "--config", "job.toml", "--dry-run"]) == 0
    assert "--batch-size 64" in capsys.readouterr().out


#: Command lines of launches, with the hosts that a file may name.
LAUNCHES = [
    line.replace("\\\n", " ").removeprefix("$ ").strip()
    for document, text in TEXTS.items()
    for line in re.findall(r"^(?:    |\$ )?paceline launch -(?:[^\n]*\\\n)*[^\n]*", text, re.MULTILINE)
]


def test_every_launch_that_is_shown_makes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("h1\nh2\n")
    assert LAUNCHES
    for line in LAUNCHES:
        [workers] = re.findall(r"-n (\d+)", line) or ["2"]
        Path("groups").write_text("0 1\n" + " ".join(map(str, range(2, int(workers)))))
        words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
        ours = words[: words.index("--")]
        mpi = ["-o", "mpi=openmpi"] if "mpi" in ours else []  # no mpirun is asked
        assert main([*ours, *mpi, "--dry-run", *words[len(ours) :]]) == 0, line + capsys.readouterr().err


def test_script_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    script = blocks("docs/saving.md", "python")[0]
    script = script.replace("train=True", "train=False").replace("first_epoch, 4", "first_epoch, 2")
    runs = [("whole", 1, script), ("broken", 1, script.replace("first_epoch, 2", "1")), ("broken", 2, script)]
    for folder, servers, text in runs:
        (tmp_path / folder).mkdir(exist_ok=True)
        run(text, f"-n 2 -s {servers}", tmp_path / folder)
    whole, broken = (read(tmp_path / folder / "job.ckpt", "a training job") for folder in ("whole", "broken"))
    assert whole.manifest["step"] == broken.manifest["step"] > 0
    assert whole.tensors.keys() == broken.tensors.keys()
    # Python's and NumPy's random numbers have other seeds in each run; the script does not draw any.
    names = [name for name in whole.tensors if not name.startswith(("rank0/rng/python", "rank0/rng/numpy"))]
    assert [name for name in names if not torch.equal(whole.tensors[name], broken.tensors[name])] == []


def test_script_saves_after_the_same_step_of_all_workers_when_one_gets_a_signal(tmp_path: Path) -> None:
    script = blocks("docs/saving.md", "python")[1]
    told = "    if store.rank == 1 and step in (3, 7):\n        signal.raise_signal(signal.SIGUSR1)\n"
    saves = '        paceline.save("job.ckpt"'
    assert saves in script
    script = script.replace("101):\n", f"11):\n{told}").replace(saves, f"        print('saves', step)\n{saves}")
    shown = re.findall(r"saves \d+", run(script, "-n 2 -s 1", tmp_path))
    assert sorted(shown) == ["saves 3", "saves 3", "saves 7", "saves 7"]
    assert read(tmp_path / "job.ckpt", "a training job").manifest["step"] == 7


def test_every_setting_is_documented_with_its_default_and_a_sentence() -> None:
    documented = {row[0]: (row[1], len(row[2]) > 10) for row in rows("docs/settings.md")}
    assert documented == {f"`{one.name}`": (f"`{one.default!r}`", True) for one in dataclasses.fields(Settings)}


def test_every_alias_is_documented() -> None:
    assert [alias for alias in ALIASES if f"`{alias}`" not in TEXTS["docs/settings.md"]] == []


def test_links_of_the_package_index_are_those_of_the_readme_made_absolute() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    source = project["project"]["urls"]["Source"]
    shown, readme = long_description(), (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(", readme)) > 10
    ours = [link.removeprefix(f"{source}/blob/main/") for link in links if link.startswith(source)]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert [path for path in ours if not (ROOT / path).exists()] == []
    assert all(url.startswith(source) for url in project["project"]["urls"].values())
    files = [url.partition("/main/")[2] for url in project["project"]["urls"].values()]
    assert [path for path in files if not (ROOT / path).exists()] == []


def long_description() -> str:
    """Return README.md as the build puts it into the package's metadata."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for one in hook["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text
