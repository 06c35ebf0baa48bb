"""The picture of a running job, for ``paceline top`` and for the panel under the output of a job. Pure.

There is one picture; a small space gets less of it. The panel has no command, servers and legend. Where lines are few,
servers and legend make room, then the workers that come last in the order are counted instead of shown. Where columns
are few, tables go without those of :data:`_DROPPED`, until each line has room for a bar.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.host.plain_text import plain
from paceline.launch.runtime import JobRecord
from paceline.observe.account import SERVER_PARTS, WORKER_PARTS, parts_of
from paceline.observe.job_view import JobView, MemberView
from paceline.observe.table import Size, duration, quantity, table

#: Letters of the parts in bars, and their colours.
LETTERS: Mapping[str, str] = {
    "data": "d", "compute": "C", "device": "v", "encode": "e", "send": "s", "wait": ".", "copy": "p", "update": "u",
    "gc": "g", "other": "o", "receive": ".", "merge": "m", "apply": "a", "rest": "r",
}  # fmt: skip
_COLOURS: Mapping[str, str] = {
    "data": "black on yellow", "compute": "black on green", "device": "black on cyan", "encode": "white on magenta",
    "send": "white on blue", "wait": "dim", "copy": "black on bright_yellow", "update": "black on bright_magenta",
    "gc": "white on red", "other": "black on white", "receive": "bright_black", "merge": "black on bright_blue",
    "apply": "black on bright_green", "rest": "white on bright_black",
}  # fmt: skip

#: Narrowest terminal that still gets a bar, and the shortest and the longest bar.
_LEAST_COLUMNS, _SHORTEST_BAR, _LONGEST_BAR = 30, 10, 60

#: Lines of the table of workers for which servers and legend make room.
_LEAST_WORKERS = 4

#: Columns that a narrow terminal goes without, in this order.
_DROPPED = ("waits for", "memory", "sent", "received", "state", "samples", "round", "host", "busy")

_HEADS = {
    "worker": ("worker", "host", "state", "round", "step", "samples", "waits for"),
    "server": ("server", "host", "state", "busy", "received", "sent", "memory"),
}

#: Orders of the workers, by name.
ORDERS: Mapping[str, Callable[[MemberView], Any]] = {
    "step": lambda one: (-one.state.step_s, one.member.rank),
    "samples": lambda one: (one.samples_per_s, one.member.rank),
    "round": lambda one: (one.state.round, one.member.rank),
    "rank": lambda one: one.member.rank,
    "host": lambda one: (one.member.host, one.member.rank),
}


@dataclass(frozen=True)
class View:
    """The choice of a reader.

    Attributes:
        order: one of :data:`ORDERS`.
        selected: rank of the worker whose account and verdicts are shown, too.
        is_panel: without the command and the servers.
        about: further lines.
    """

    order: str = "step"
    selected: int | None = None
    is_panel: bool = False
    about: tuple[str, ...] = ()


_PLAIN = View()


def in_order(job: JobView, order: str) -> list[MemberView]:
    """Return the workers in an order of :data:`ORDERS`."""
    return sorted(job.workers, key=ORDERS[order])


def picture(job: JobView, record: JobRecord, now: float, size: Size, view: View = _PLAIN) -> list[Text]:
    """Return the picture of a job as lines that fit a terminal; ``now`` is seconds since 1970."""
    columns, workers = max(size.columns, 20), in_order(job, view.order)
    words = [f"job {record.id}", duration(now - record.started), *job.progress, *job.changes("starts", "walks")[-1:]]
    head = [Text(line, "bold") for line in _flow(words, columns)]
    verdicts = [Text(line, "bold yellow") for text in job.status.verdicts for line in textwrap.wrap(text, columns)]
    if view.is_panel:
        head += [Text(line) for text in view.about for line in textwrap.wrap(text, columns)]
        left = max(size.lines - len(head), 0)
        verdicts = _cut(verdicts, left // 2 + left % 2 if workers else left)
        lines = [*head, *_workers(workers, columns, left - len(verdicts), view), *verdicts]
    else:
        lines = [*head, Text(plain(record.command)), Text()]
        end = [*verdicts, *_selected(job, workers, columns, view), *_about(view)]
        more = [
            [Text(), *_with_bars("server", job.servers, columns, view)] if job.servers else [],
            [Text(), *_legend(job, columns)],
        ]
        left = size.lines - len(lines) - len(end)
        while size.lines and more and left - sum(map(len, more)) < min(len(workers) + 1, _LEAST_WORKERS):
            del more[0]
        end = [*(line for one in more for line in one), *end]
        left = max(size.lines - len(lines) - len(end), _LEAST_WORKERS) if size.lines else len(workers) + 2
        lines += [*_workers(workers, columns, left, view), *end]
    for line in lines:
        line.truncate(columns)
        line.rstrip()
    return lines[: size.lines] if size.lines else lines


def painted(lines: Sequence[Text], environ: Mapping[str, str]) -> list[bytes]:
    """Return lines with the colours that a terminal has: TERM and COLORTERM say which; NO_COLOR switches them off."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, legacy_windows=False, _environ=environ)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return file.getvalue().encode(errors="replace").split(b"\n")[:-1]


def _flow(words: Sequence[str], columns: int) -> list[str]:
    """Return words in lines, two blanks apart; only one that is longer than a line is cut in two."""
    first, *others = [part for word in words for part in textwrap.wrap(word, columns) or [""]]
    lines = [first]
    for word in others:
        longer = f"{lines[-1]}  {word}"
        lines[-1:] = [longer] if len(longer) <= columns else [lines[-1], word]
    return lines


def _cut(lines: list[Text], most: int) -> list[Text]:
    return lines if len(lines) <= most else [*lines[: max(most - 1, 0)], Text("...")][:most]


def _workers(workers: Sequence[MemberView], columns: int, most: int, view: View) -> list[Text]:
    """Return the table of workers in so many lines, the selected one among them."""
    if most < 2 or not workers:
        return []
    if len(workers) < most:
        return _with_bars("worker", workers, columns, view)
    count = max(most - 2, 1)
    chosen = next((index for index, one in enumerate(workers) if one.member.rank == view.selected), 0)
    start = max(0, chosen - count + 1)
    shown, left = workers[start : start + count], len(workers) - count
    more = [Text(f"and {left} more workers", "dim")] if most > 2 else []
    return [*_with_bars("worker", shown, columns, view), *more]


def _with_bars(role: str, members: Sequence[MemberView], columns: int, view: View) -> list[Text]:
    """Return a table whose lines end with a bar, with as many columns as leave room for it."""
    cells = [_worker_cells(one) if role == "worker" else _server_cells(one) for one in members]
    heads = list(_HEADS[role])
    lines = table(heads, cells).split("\n")
    for name in _DROPPED:
        if max(map(len, lines)) + 2 + _SHORTEST_BAR <= columns:
            break
        if name in heads:
            index = heads.index(name)
            del heads[index]
            cells = [row[:index] + row[index + 1 :] for row in cells]
            lines = table(heads, cells).split("\n")
    width = max(map(len, lines)) + 2
    length = min(columns - width, _LONGEST_BAR)
    found = [Text(lines[0], "dim")]
    for line, one in zip(lines[1:], members, strict=True):
        is_selected = one.is_worker and one.member.rank == view.selected
        text = Text().append(f"{line:{width}}", "reverse" if is_selected else "")
        if columns >= _LEAST_COLUMNS and length >= _SHORTEST_BAR:
            text.append_text(bar(one.shares, parts_of(role), length))
        found.append(text)
    return found


def _worker_cells(one: MemberView) -> tuple[str, ...]:
    state, rate = one.state, one.samples_per_s
    return (
        one.name, one.member.host, state.phase, str(state.round),
        f"{1000 * state.step_s:.0f} ms" if state.step_s else "",
        f"{rate:,.0f}/s" if rate else "", ",".join(map(str, one.waits_for)),
    )  # fmt: skip


def _server_cells(one: MemberView) -> tuple[str, ...]:
    state, busy = one.state, 1 - one.shares.get("receive", 1.0)
    return (
        one.name, one.member.host, state.phase, f"{busy:.0%}", quantity(state.received), quantity(state.sent),
        quantity(state.memory),
    )  # fmt: skip


def bar(shares: Mapping[str, float], parts: Sequence[str], length: int) -> Text:
    """Return the parts of a step as so many letters, each part with its share of them."""
    text, done = Text(), 0.0
    for part in parts:
        done += shares.get(part, 0.0)
        text.append(LETTERS[part] * (round(done * length) - len(text)), _COLOURS[part])
    return text


def _legend(job: JobView, columns: int) -> list[Text]:
    parts = [part for part in (*WORKER_PARTS, *SERVER_PARTS) if any(one.shares.get(part) for one in job.members)]
    return [
        Text(line, "dim")
        for line in _flow([f"{LETTERS[part]} {part}" for part in dict.fromkeys(parts)] or [""], columns)
    ]


def _selected(job: JobView, workers: Sequence[MemberView], columns: int, view: View) -> list[Text]:
    """Return the account of the selected worker, and its last verdicts."""
    one = next((one for one in workers if one.member.rank == view.selected), None)
    if one is None:
        return []
    shares = [f"{part} {one.shares[part]:.0%}" for part in WORKER_PARTS if one.shares.get(part, 0.0) >= 0.005]
    words = [f"{one.name} on {one.member.host} (pid {one.member.pid})", *shares]
    lines = [Text(), *(Text(line, "bold") for line in _flow(words, columns))]
    told = [one for one in job.status.told if (one.role, one.rank) == ("worker", view.selected)]
    for verdict in told[:-4:-1]:
        lines += [Text(line) for line in textwrap.wrap(f"{duration(verdict.ago_s)} ago: {verdict.text}", columns)]
    return lines if told else [*lines, Text("no verdict so far", "dim")]


def _about(view: View) -> list[Text]:
    return [Text(line, "dim") for line in ("", *view.about)] if view.about else []
