"""The figures of the job for the user's tools: an endpoint for Prometheus, the page of the job, and trackers.

They run in the scheduler, because every job with servers has one, whichever launcher started it, and it has all
figures. The scheduler's thread takes a picture of the job once a second and hands it over; it never waits for a tool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping

import paceline
from paceline.config import Settings, metrics_address
from paceline.errors import ConfigError
from paceline.host.text_files import write_text
from paceline.membership import Membership
from paceline.observe import page, prometheus
from paceline.observe.job_view import JobView
from paceline.observe.page_history import PageHistory
from paceline.observe.tracking import TrackerThread, by_step, overview
from paceline.observe.verdicts import Verdict
from paceline.scheduler.web import Dashboard, Metrics
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Seconds between two pictures, and between two overviews for trackers.
PICTURE_INTERVAL_S, OVERVIEW_INTERVAL_S = 1.0, 5.0

#: How long trackers may take at the end of the job: less than the launcher waits for the scheduler.
CLOSE_TIMEOUT_S = 5.0

#: How long open pages may take for the last news.
_LAST_NEWS_S = 1.0


class Exports:
    """Hands the figures of the job to the tools that the settings name.

    Raises:
        ConfigError: a tool is unknown, a port cannot be bound, or the report cannot be written.
        MissingExtraError: the package of a tool is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self._job = settings.job_id
        self._picture = m.Status([], [], []), list[Verdict](), time.time()
        """The last status, the processes that were slow then, and the time. Nobody changes it."""
        self._next, self._next_overview, self._told = -math.inf, -math.inf, 0
        try:
            self._trackers = [TrackerThread(one.strip(), self._job) for one in settings.report_to.split(",") if one]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        about = self._job, settings.num_workers, settings.num_servers
        self._history = PageHistory(*about, time.time(), time.monotonic())
        self._report = settings.report
        if self._report:
            page.check_report(self._report)
        self.metrics = Metrics(settings.metrics, self._text) if settings.metrics else None
        self.page = None
        if settings.dashboard:
            self.page = Dashboard(int(settings.dashboard), self._history.copy, settings.page_token)
        if self.metrics is not None and metrics_address(settings.metrics)[1] == 0:
            logger.warning("metrics of this job: %s", self.metrics.url)
        if self.page is not None:
            logger.warning("the page of this job: %s", self.page.url)

    def note(self, membership: Membership, now: float) -> None:
        """Hand over the figures of now, if it is time. Does not wait."""
        is_wanted = self._has_page or self.metrics is not None or self._trackers
        if now < self._next or not is_wanted:
            return
        self._next = now + PICTURE_INTERVAL_S
        status = membership.status(now)
        self._draw(status, now)
        if self.metrics is not None:
            self._picture = status, membership.advice.verdicts.slow, time.time()
        if self._trackers:
            self._track(membership, status, now)

    def _text(self) -> str:
        """Return the last figures for Prometheus. Called by the threads of requests."""
        status, slow, now = self._picture
        return prometheus.text(JobView(status), slow, self._job, paceline.__version__, now)

    @property
    def _has_page(self) -> bool:
        return self.page is not None or bool(self._report)

    def _draw(self, status: m.Status, now: float) -> None:
        """Go on with the page and its report."""
        if not self._has_page:
            return
        with contextlib.nullcontext() if self.page is None else self.page.lock:
            news = self._history.note(status, now)
            if self.page is not None:
                self.page.tell(news)

    def _track(self, membership: Membership, status: m.Status, now: float) -> None:
        reported = membership.advice.figures.since(self._told)
        self._told = membership.advice.figures.made
        for step, figures in by_step(reported):
            self._put(figures, step)
        if now >= self._next_overview:
            self._next_overview = now + OVERVIEW_INTERVAL_S
            step, figures = overview(JobView(status))
            self._put(figures, step)

    def _put(self, figures: Mapping[str, float], step: int) -> None:
        for one in self._trackers if figures else ():
            one.put(figures, step)

    def close(self, membership: Membership) -> None:
        """Hand over the last figures, and let the trackers close their tools. Takes :data:`CLOSE_TIMEOUT_S` at most."""
        now, deadline = time.monotonic(), time.monotonic() + CLOSE_TIMEOUT_S
        membership.advice.figures.settle((), math.inf)
        if self._trackers or self._has_page:
            status = membership.status(now)
            self._draw(status, now)
            self._next_overview = now
            self._track(membership, status, now)
        if self._report:
            self._write_report()
        if self.page is not None:
            self.page.close(_LAST_NEWS_S)
        for one in self._trackers:
            one.close(max(0.1, deadline - time.monotonic()))
        if self.metrics is not None:
            self.metrics.close()

    def _write_report(self) -> None:
        try:
            write_text(self._report, page.page(self._history.copy()).decode())
        except OSError as error:
            logger.error("the report %s of this job is not written: %s", self._report, error)
