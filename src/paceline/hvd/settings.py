"""Settings of the Horovod interface, from the variables that Horovod reads.

Variables of Horovod's autotuner, and of its launcher's own rendezvous, change nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.hvd.negotiation import NegotiationSettings

DEFAULT_FUSION_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class HvdSettings:
    """Settings of one process. Those of rank 0 count for negotiation and fusion."""

    fusion_threshold_bytes: int = DEFAULT_FUSION_BYTES
    """Most bytes that are fused; 0: no fusion."""
    cycle_time_s: float = 0.001
    """How long requests are collected while nobody waits for them."""
    cache_capacity: int = 1024
    """Operations that the response cache holds."""
    hierarchical: bool = True
    """Reduce inside each host first, where a job has several hosts."""
    dynamic_process_sets: bool = False
    """Whether process sets can be added and removed."""
    timeout_s: float = 30.0
    """Longest time that one operation may take once all ranks are ready."""
    start_timeout_s: float = 60.0
    """How long ``init`` waits for all ranks."""
    timeline: str = ""
    """File of the timeline, or ``DYNAMIC``."""
    timeline_mark_cycles: bool = False
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0

    @property
    def options(self) -> NegotiationSettings:
        """The settings of the negotiation machine."""
        return NegotiationSettings(
            cache_capacity=self.cache_capacity,
            stall_warning_s=self.stall_warning_s if self.stall_check else 0.0,
            stall_shutdown_s=self.stall_shutdown_s if self.stall_check else 0.0,
        )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "")
    return text.lower() not in ("0", "false", "no", "off") if text else default


def read_settings(env: Mapping[str, str] | None = None) -> HvdSettings:
    """Return the settings of this process.

    Raises:
        ConfigError: a variable is not a number, or the time of a stall's end does not exceed that of its warning.
    """
    env = os.environ if env is None else env
    settings = HvdSettings(
        fusion_threshold_bytes=int(_number(env, "HOROVOD_FUSION_THRESHOLD", DEFAULT_FUSION_BYTES)),
        cycle_time_s=_number(env, "HOROVOD_CYCLE_TIME", 1.0) / 1000,
        cache_capacity=int(_number(env, "HOROVOD_CACHE_CAPACITY", 1024)),
        hierarchical=_flag(env, "HOROVOD_HIERARCHICAL_ALLREDUCE", True),
        dynamic_process_sets=_flag(env, "HOROVOD_DYNAMIC_PROCESS_SETS", False),
        timeout_s=_number(env, "HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0),
        start_timeout_s=_number(env, "HOROVOD_START_TIMEOUT", 60.0),
        timeline=env.get("HOROVOD_TIMELINE", ""),
        timeline_mark_cycles=_flag(env, "HOROVOD_TIMELINE_MARK_CYCLES", False),
        stall_check=not _flag(env, "HOROVOD_STALL_CHECK_DISABLE", False),
        stall_warning_s=_number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown_s=_number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
    )
    if 0 < settings.stall_shutdown_s <= settings.stall_warning_s:
        raise ConfigError("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS must exceed HOROVOD_STALL_CHECK_TIME_SECONDS")
    return settings
