"""Times in docs/failures.md are those of the code, and the defaults keep to the order of times."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict

from paceline.config import Settings
from paceline.launch.job_spec import Graces
from paceline.launch.remote.agent_link import SILENCE_S
from paceline.membership import LEAVE_TIMEOUT_S
from paceline.membership.liveness import LAST_WORDS_S
from paceline.net import call, client, endpoints, lifeline, received, sockets
from tests.docs.pages import TEXTS, rows

TEXT = TEXTS["docs/failures.md"]
ORDER = [row for row in rows("docs/failures.md", "## Which time must exceed which") if row[0].startswith("`")]

#: How the document calls times that are no settings.
CONSTANTS = {
    "KEEPALIVE_S": endpoints.KEEPALIVE_S,
    "RTO_MAX_S": endpoints.RTO_MAX_MS / 1000,
    "BULK_TIMEOUT_S": endpoints.BULK_TIMEOUT_S,
    "CONTROL_TIMEOUT_S": endpoints.CONTROL_TIMEOUT_S,
    "PROBE_AFTER_S": call.PROBE_AFTER_S,
    "CLIENT_CHECK_INTERVAL_S": client.CHECK_INTERVAL_S,
    "LAST_RETRY_S": sockets.LAST_RETRY_S,
    "UNREAD_S": received.UNREAD_S,
    "LEAVE_TIMEOUT_S": LEAVE_TIMEOUT_S,
    "LAST_WORDS_S": LAST_WORDS_S,
    "SILENCE_S": SILENCE_S,
    "BYE_TIMEOUT_S": lifeline.BYE_TIMEOUT_S,
    "LAUNCH_SLACK_S": 3.0,
    "survivors_s": Graces().survivors_s,
}
TIMES = {name: value for name, value in asdict(Settings()).items() if name.endswith("_s")} | CONSTANTS


def test_times_that_are_settings_have_their_defaults() -> None:
    stated = re.findall(r"`(\w+_s|[A-Z]\w+_S)` \(([\d.]+) s\)", TEXT)
    assert len(stated) > 5
    for name, seconds in stated:
        assert TIMES[name] == float(seconds), name


def test_defaults_keep_to_the_order() -> None:
    assert ORDER
    for row in ORDER:
        longer, shorter = row[0].strip("`"), row[1]
        assert longer in TIMES
        if shorter.startswith("`"):
            names = {node.id for node in ast.walk(ast.parse(shorter.strip("`"))) if isinstance(node, ast.Name)}
            assert names <= set(TIMES)
            assert TIMES[longer] > eval(shorter.strip("`"), {}, TIMES), longer
