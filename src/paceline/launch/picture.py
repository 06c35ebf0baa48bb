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
from paceline.membership.log import sentence
from paceline.observe.account import SERVER_PARTS, WORKER_PARTS, parts_of
from paceline.observe.rows import progress, rows_of
from paceline.observe.table import Size, duration, quantity, table
from paceline.wire import messages as m

Row = Mapping[str, Any]

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
ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "step": lambda row: (-row["step_s"], row["rank"]),
    "samples": lambda row: (row["parts"].get("samples_per_s", 0.0), row["rank"]),
    "round": lambda row: (row["round"], row["rank"]),
    "rank": lambda row: row["rank"],
    "host": lambda row: (row["host"], row["rank"]),
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


def in_order(status: m.Status, order: str) -> list[int]:
    """Return the ranks of the workers in an order of :data:`ORDERS`."""
    return [row["rank"] for row in _sorted(rows_of(status), order)]


def picture(status: m.Status, record: JobRecord, now: float, size: Size, view: View = _PLAIN) -> list[Text]:
    """Return the picture of a job as lines that fit a terminal; ``now`` is seconds since 1970."""
    columns, rows = max(size.columns, 20), rows_of(status)
    workers, servers = _sorted(rows, view.order), [row for row in rows if row["role"] == "server"]
    far = progress(status, record.workers, record.servers)
    words = [f"job {record.id}", duration(now - record.started), *far, *_last_change(status)]
    head = [Text(line, "bold") for line in _flow(words, columns)]
    verdicts = [Text(line, "bold yellow") for text in status.verdicts for line in textwrap.wrap(text, columns)]
    if view.is_panel:
        head += [Text(line) for text in view.about for line in textwrap.wrap(text, columns)]
        left = max(size.lines - len(head), 0)
        verdicts = _cut(verdicts, left // 2 + left % 2 if workers else left)
        lines = [*head, *_workers(workers, columns, left - len(verdicts), view), *verdicts]
    else:
        lines = [*head, Text(plain(record.command)), Text()]
        end = [*verdicts, *_selected(status, workers, columns, view), *_about(view)]
        more = [
            [Text(), *_with_bars("server", servers, columns, view)] if servers else [],
            [Text(), *_legend(rows, columns)],
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


def _last_change(status: m.Status) -> list[str]:
    """Return the last change of the membership, but for the start and for epochs of pools."""
    last = next((one for one in reversed(status.changes) if one.kind not in ("starts", "walks")), None)
    return [] if last is None else [f"{duration(last.ago_s)} ago: {sentence(last)}"]


def _sorted(rows: Sequence[Row], order: str) -> list[Row]:
    return sorted((row for row in rows if row["role"] == "worker"), key=ORDERS[order])


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


def _workers(workers: Sequence[Row], columns: int, most: int, view: View) -> list[Text]:
    """Return the table of workers in so many lines, the selected one among them."""
    if most < 2 or not workers:
        return []
    if len(workers) < most:
        return _with_bars("worker", workers, columns, view)
    count = max(most - 2, 1)
    chosen = next((index for index, row in enumerate(workers) if row["rank"] == view.selected), 0)
    start = max(0, chosen - count + 1)
    shown, left = workers[start : start + count], len(workers) - count
    more = [Text(f"and {left} more workers", "dim")] if most > 2 else []
    return [*_with_bars("worker", shown, columns, view), *more]


def _with_bars(role: str, rows: Sequence[Row], columns: int, view: View) -> list[Text]:
    """Return a table whose lines end with a bar, with as many columns as leave room for it."""
    cells = [_worker_cells(row) if role == "worker" else _server_cells(row) for row in rows]
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
    for line, row in zip(lines[1:], rows, strict=True):
        is_selected = role == "worker" and row["rank"] == view.selected
        text = Text().append(f"{line:{width}}", "reverse" if is_selected else "")
        if columns >= _LEAST_COLUMNS and length >= _SHORTEST_BAR:
            text.append_text(bar(row["parts"], parts_of(role), length))
        found.append(text)
    return found


def _worker_cells(row: Row) -> tuple[str, ...]:
    rate = row["parts"].get("samples_per_s", 0.0)
    return (
        f"worker {row['rank']}", row["host"], row["state"], str(row["round"]),
        f"{1000 * row['step_s']:.0f} ms" if row["step_s"] else "",
        f"{rate:,.0f}/s" if rate else "", ",".join(map(str, row["waits_for"])),
    )  # fmt: skip


def _server_cells(row: Row) -> tuple[str, ...]:
    busy = 1 - row["parts"].get("receive", 1.0)
    return (
        f"server {row['rank']}", row["host"], row["state"], f"{busy:.0%}", quantity(row["received"]),
        quantity(row["sent"]), quantity(row["memory"]),
    )  # fmt: skip


def bar(shares: Mapping[str, float], parts: Sequence[str], length: int) -> Text:
    """Return the parts of a step as so many letters, each part with its share of them."""
    text, done = Text(), 0.0
    for part in parts:
        done += shares.get(part, 0.0)
        text.append(LETTERS[part] * (round(done * length) - len(text)), _COLOURS[part])
    return text


def _legend(rows: Sequence[Row], columns: int) -> list[Text]:
    parts = [part for part in (*WORKER_PARTS, *SERVER_PARTS) if any(row["parts"].get(part) for row in rows)]
    return [
        Text(line, "dim")
        for line in _flow([f"{LETTERS[part]} {part}" for part in dict.fromkeys(parts)] or [""], columns)
    ]


def _selected(status: m.Status, workers: Sequence[Row], columns: int, view: View) -> list[Text]:
    """Return the account of the selected worker, and its last verdicts."""
    row = next((row for row in workers if row["rank"] == view.selected), None)
    if row is None:
        return []
    shares = [f"{part} {row['parts'][part]:.0%}" for part in WORKER_PARTS if row["parts"].get(part, 0.0) >= 0.005]
    words = [f"worker {row['rank']} on {row['host']} (pid {row['pid']})", *shares]
    lines = [Text(), *(Text(line, "bold") for line in _flow(words, columns))]
    told = [one for one in status.told if (one.role, one.rank) == ("worker", view.selected)]
    for one in told[:-4:-1]:
        lines += [Text(line) for line in textwrap.wrap(f"{duration(one.ago_s)} ago: {one.text}", columns)]
    return lines if told else [*lines, Text("no verdict so far", "dim")]


def _about(view: View) -> list[Text]:
    return [Text(line, "dim") for line in ("", *view.about)] if view.about else []
