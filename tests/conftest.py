"""Rules check themselves after every event in all tests, also in jobs of ``paceline launch``; test jobs are forked."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

from paceline.config import variable
from paceline.testing import check_every_rule
from tests.clusters.fork_server import fork_jobs

os.environ[variable("check_rules")] = "1"
check_every_rule()
fork_jobs()

# A shell without job control ignores SIGINT in what runs in its background; launchers of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long examples take depends on what else the machine does.
settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")
