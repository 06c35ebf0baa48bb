"""The page of a job in a real browser shows what the scheduler knows, to those who may see it, and stays small."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.page_history import PageHistory
from paceline.scheduler.web import Dashboard
from tests.browser.chromium import PROGRAM, Chromium
from tests.browser.simulated import SimulatedJob

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PACELINE_TEST_BROWSER"), reason="nox -s browser"),
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium"),
]

NASTY = "</script><script>window.taken=1</script><img src=x onerror=window.taken=1>{}"
#: Texts of a table, by name of the row and of the column.
CELLS = """Object.fromEntries([...document.querySelectorAll("tr[data-name]")].map(tr => [tr.dataset.name,
  Object.fromEntries([...tr.querySelectorAll("td[data-column]")].map(td => [td.dataset.column, td.textContent]))]))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def job() -> Iterator[SimulatedJob]:
    made = SimulatedJob(4, 2, dashboard="0")
    yield made
    made.close()


def page_of(job: SimulatedJob) -> Dashboard:
    assert job.exports.page is not None
    return job.exports.page


def follow(browser: Chromium, job: SimulatedJob, rounds: int) -> None:
    """Carry out rounds, and wait for the page now and then."""
    for number in range(rounds):
        job.turn()
        if number % 16 == 15 or number == rounds - 1:
            browser.settle(f"data.state.round === {job.round}")


def test_values_on_screen_are_the_schedulers(browser: Chromium, job: SimulatedJob) -> None:
    browser.asked.clear()
    browser.complaints.clear()
    job.turn()
    browser.open(page_of(job).url)
    browser.settle("data !== null")
    follow(browser, job, 40)
    cells = browser.value(CELLS)
    rows = job.rows()
    assert set(cells) == {f"{row['role']} {row['rank']}" for row in rows}
    for row in rows:
        shown = cells[f"{row['role']} {row['rank']}"]
        assert (shown["host"], shown["state"], shown["memory"]) == (
            row["host"],
            "live",
            f"{row['memory'] // 2**20} MiB",
        )
        if row["role"] == "worker":
            rate = f"{row['parts']['samples_per_s']:,.0f}/s"
            assert (shown["round"], shown["samples"]) == ("41", rate)
            assert shown["step"] == f"{1000 * row['step_s']:,.0f} ms"
        else:
            assert shown["busy"] == f"{1 - row['parts']['receive']:.0%}"
            assert (shown["values"], shown["buckets"]) == ("1,000,000", "8")
    [slow] = job.membership.advice.verdicts.sentences
    assert "worker 1 on node3" in slow
    assert browser.value("byId('slow').innerText.trim()") == slow
    assert "round 41" in browser.value("byId('head').textContent")
    assert slow in browser.value("byId('events').textContent")
    assert "worker 1" in browser.value("byId('late').rows[0].textContent")
    assert re.search(r"last of 90% of all cohorts, \d{1,4} ms after", browser.value("byId('late').rows[0].textContent"))
    assert browser.value("[...byId('stale').rows].map(row => row.cells[0].textContent)") == ["1", "2", "3", "4"]
    assert "60%" in browser.value("byId('stale').rows[0].textContent")
    assert "loss" in browser.value("byId('figures').textContent")
    history: PageHistory = job.exports._history
    assert_same_history(browser.value("data"), history.copy())
    assert {url.split("/")[2] for url in browser.asked if url.startswith("http")} == {page_of(job).url.split("/")[2]}
    assert browser.complaints == []


def assert_same_history(shown: Any, kept: Any) -> None:
    for one, other in [
        (shown["rate"], kept["rate"]),
        *((shown["lanes"][name], kept["lanes"][name]) for name in kept["lanes"]),
    ]:
        for part in ("older", "recent"):
            assert len(one[part]) == len(other[part])
            for point, (start, span, sums) in zip(one[part], other[part], strict=True):
                assert point[:2] == pytest.approx([start, span], abs=0.01)
                assert point[2] == pytest.approx(list(sums), rel=1e-4, abs=0.01)
        assert one["length"] == pytest.approx(other["length"], abs=0.01)


def test_lanes_are_drawn(browser: Chromium, job: SimulatedJob) -> None:
    browser.open(page_of(job).url)
    browser.settle("data !== null")
    follow(browser, job, 20)
    pixels = """(() => { draw(); const found = {};
      for (const tr of document.querySelectorAll("#workers tr[data-name]")) {
        const canvas = tr.querySelector("canvas"), x = canvas.width - 3, context = canvas.getContext("2d");
        const column = context.getImageData(x, 0, 1, canvas.height).data, rows = [...Array(canvas.height).keys()];
        const isLoading = y => column[4 * y] === 224 && column[4 * y + 1] === 168 && column[4 * y + 2] === 0;
        found[tr.dataset.name] = rows.filter(isLoading).length / canvas.height;
      } return found; })()"""
    loading = browser.value(pixels)
    assert loading["worker 1"] == pytest.approx(0.45, abs=0.1)
    assert loading["worker 0"] == pytest.approx(0.05, abs=0.07)


@pytest.mark.parametrize("change", ["", "?token=wrong"])
def test_without_the_token_nothing_is_shown(browser: Chromium, job: SimulatedJob, change: str) -> None:
    job.turn()
    browser.open(page_of(job).url.partition("?")[0] + change)
    text = browser.value("document.documentElement.innerText")
    assert text.strip() == "open the whole address that the launcher has printed, on that machine"


def test_a_thousand_rounds_leave_no_leak_and_the_same_history(browser: Chromium, job: SimulatedJob) -> None:
    browser.open(page_of(job).url)
    browser.settle("data !== null")
    follow(browser, job, 450)  # from here on lanes are full
    before = browser.held()
    follow(browser, job, 1000)
    after = browser.held()
    assert after["nodes"] <= before["nodes"] + 50, (before, after)
    assert after["listeners"] <= before["listeners"], (before, after)
    assert after["heap"] < before["heap"] + 2**20, (before, after)
    print(f"after {job.round - 1000} rounds {before}, after {job.round} rounds {after}")
    assert_same_history(browser.value("data"), job.exports._history.copy())


def test_hundred_members_fit(browser: Chromium) -> None:
    job = SimulatedJob(96, 4, dashboard="0")
    try:
        browser.open(page_of(job).url)
        browser.settle("data !== null")
        follow(browser, job, 16)
        assert len(browser.value(CELLS)) == 100
        assert "worker 1 on node5" in browser.value("byId('slow').innerText")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    finally:
        job.close()


def test_page_says_that_the_job_has_ended(browser: Chromium) -> None:
    job = SimulatedJob(2, 1, dashboard="0")
    browser.open(page_of(job).url)
    browser.settle("data !== null")
    follow(browser, job, 3)
    job.close()
    assert browser.settle("byId('link').textContent", lambda text: text != "live") == "the job has ended"


def test_report_opens_without_a_server_and_takes_no_text_for_html(browser: Chromium, tmp_path: Path) -> None:
    job = SimulatedJob(2, 1, host=NASTY, report=str(tmp_path / "job.html"))
    for _ in range(20):
        job.turn()
    rows = job.rows()
    job.close()
    browser.asked.clear()
    browser.complaints.clear()
    browser.open(f"file://{tmp_path / 'job.html'}")
    cells = browser.settle(CELLS)
    assert cells["worker 1"]["host"] == NASTY.format(2)
    assert cells["worker 1"]["sent"] == f"{rows[2]['sent'] / 2**20:.1f} MiB"
    assert NASTY.format(2) in browser.value("byId('slow').textContent")
    assert browser.value("window.taken === undefined")
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert [url for url in browser.asked if not url.startswith(("file:", "data:"))] == []
    assert browser.complaints == []
