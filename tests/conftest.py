"""Lets rules check themselves after every event in all tests, also in jobs that ``paceline launch`` starts."""

from __future__ import annotations

import os

from paceline.config import variable
from paceline.testing import check_every_rule

os.environ[variable("check_rules")] = "1"
check_every_rule()
