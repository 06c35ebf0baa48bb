"""Each row of docs/failures.md names a test that asserts its time, and the defaults keep to the order of times."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.config import Settings
from paceline.launch.remote.protocol import SILENCE_S
from paceline.launch.spec import Graces
from paceline.membership import LEAVE_TIMEOUT_S
from paceline.membership.liveness import LAST_WORDS_S
from paceline.net import call, client, connection, endpoints, lifeline, sockets

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/failures.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "::" in line]
ORDER = [line for line in TEXT.split("\n## Which time must exceed which\n")[1].splitlines() if line.startswith("| `")]

#: How the document calls times that are no settings.
CONSTANTS = {
    "KEEPALIVE_S": endpoints.KEEPALIVE_S,
    "RTO_MAX_S": endpoints.RTO_MAX_MS / 1000,
    "BULK_TIMEOUT_S": endpoints.BULK_TIMEOUT_S,
    "CONTROL_TIMEOUT_S": endpoints.CONTROL_TIMEOUT_S,
    "PROBE_AFTER_S": call.PROBE_AFTER_S,
    "CLIENT_CHECK_INTERVAL_S": client.CHECK_INTERVAL_S,
    "LAST_RETRY_S": sockets.LAST_RETRY_S,
    "UNREAD_S": connection.UNREAD_S,
    "LEAVE_TIMEOUT_S": LEAVE_TIMEOUT_S,
    "LAST_WORDS_S": LAST_WORDS_S,
    "SILENCE_S": SILENCE_S,
    "BYE_TIMEOUT_S": lifeline.BYE_TIMEOUT_S,
    "LAUNCH_SLACK_S": 3.0,
    "survivors_s": Graces().survivors_s,
}
TIMES = {name: value for name, value in asdict(Settings()).items() if name.endswith("_s")} | CONSTANTS


def shown_by(row: str) -> list[tuple[Path, str]]:
    return [(ROOT / path, name) for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)]


def source_of(path: Path, name: str) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
    raise AssertionError(f"{path} has no {name}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_row_names_a_test_that_exists(row: str) -> None:
    found = shown_by(row)
    assert found, row
    for path, name in found:
        assert source_of(path, name)


@pytest.mark.parametrize("row", [row for row in ROWS if "< " in row], ids=lambda row: row[2:40])
def test_time_of_a_row_is_asserted_by_its_test(row: str) -> None:
    (limit,) = re.findall(r"\| < (\d+) s", row)
    for path, name in shown_by(row):
        source, module = source_of(path, name), path.read_text()
        if f"NOTICED_WITHIN_S = {limit}.0" in module:
            assert re.search(r"< NOTICED_WITHIN_S", source), f"{name} asserts no time"
        else:
            assert f"wait({limit})" in source, f"{name} waits without this limit"


def test_times_that_are_settings_have_their_defaults() -> None:
    stated = re.findall(r"`(\w+_s|[A-Z]\w+_S)` \(([\d.]+) s\)", TEXT)
    assert len(stated) > 5
    for name, seconds in stated:
        assert TIMES[name] == float(seconds), name


def test_every_role_and_kind_of_fault_has_a_row() -> None:
    words = (
        "kill -9|SIGSTOP|exception|exit code|out of memory|cable is cut|to, or from, a host|slow network|host is down|"
        "full disk|stalled|wrong key|rank that is taken|other version|garbage|flipped bit|no memory for a key|"
        "launcher|fork|Ctrl-C"
    )
    missing = [word for word in words.split("|") if not any(word in row for row in ROWS)]
    assert missing == []


@pytest.mark.parametrize("row", ORDER)
def test_defaults_keep_to_the_order(row: str) -> None:
    longer, shorter = [cell.strip() for cell in row.strip("|").split("|")][:2]
    assert longer.strip("`") in TIMES
    if shorter.startswith("`"):
        names = {node.id for node in ast.walk(ast.parse(shorter.strip("`"))) if isinstance(node, ast.Name)}
        assert names <= set(TIMES)
        assert TIMES[longer.strip("`")] > eval(shorter.strip("`"), {}, TIMES)
