"""The picture shows every figure of the report, and its texts do not cover each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from benchmarks.__main__ import NAMES, report
from benchmarks.picture import COLOURS, Panel, description, draw, figures, panels

ROOT = Path(__file__).parents[2]
REPORT = (ROOT / "docs/benchmarks.md").read_text()
STORES, TRAINING = figures(REPORT)
EXTREME = panels(
    {"fast": {"arena": 0.5, "mxnet": 9999.0}, "equal": {"shm": 1.0, "tcp": 1.0, "gloo": 1.0}},
    {"a net of a long name, 16 workers, batch 1024": {"paceline": 3.0, "paceline-server": 3.0, "ddp": 2, "alone": 1}},
)


@pytest.fixture(params=[panels(STORES, TRAINING), EXTREME], ids=["the report", "extremes"])
def rows(request: pytest.FixtureRequest) -> list[Panel]:
    rows: list[Panel] = request.param
    return rows


def drawn(rows: list[Panel]) -> Figure:
    figure = draw(rows)
    FigureCanvasAgg(figure).draw()
    return figure


def texts(figure: Figure) -> list[Text]:
    return [one for one in figure.findobj(Text) if one.get_text() and one.get_visible()]


def boxes(figure: Figure) -> dict[str, Bbox]:
    return {f"{index} {one.get_text()}": one.get_window_extent() for index, one in enumerate(texts(figure))}


def covers(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > 0 and shared.height > 0


def test_every_row_of_the_report_has_a_panel_and_every_figure_a_bar() -> None:
    rows = panels(STORES, TRAINING)
    assert len(rows) == len(STORES) + len(TRAINING) == 9
    assert sum(len(row.bars) for row in rows) == sum(map(len, [*STORES.values(), *TRAINING.values()]))
    for row in rows:
        assert row.bars[0].kind == "paceline"
        assert row.bars[0].ratio == 1


def test_report_gives_back_the_figures_it_was_written_from() -> None:
    stores = {"some keys": {"arena": 1.25, "mxnet": 12.5}, "other keys": dict.fromkeys(NAMES, 3.0)}
    training = {"a net": {"paceline": 1.5, "paceline-server": 2.5, "ddp": 3.5, "alone": 0.5}}
    assert figures(report(stores, training, "picture.png", ["", "| ms |", "|---|"])) == (stores, training)


def test_picture_in_the_documents_is_of_the_tables_beside_it() -> None:
    with Image.open(ROOT / "docs/benchmarks.png") as picture:
        said = picture.info["Description"]
    assert said == description(panels(STORES, TRAINING)), "run python -m benchmarks --redraw"


def test_labels_say_milliseconds_and_the_multiple_of_the_first_bar() -> None:
    [row] = panels({"keys": {"arena": 17.0, "shm": 32.76, "mxnet": 211.42}}, {})
    assert [bar.label for bar in row.bars] == ["17.0 ms, 1.00 ×", "32.8 ms, 1.93 ×", "211 ms, 12 ×"]


def test_every_panel_is_drawn_with_its_title_names_and_labels(rows: list[Panel]) -> None:
    figure = drawn(rows)
    assert len(figure.axes) == len(rows)
    for axes, row in zip(figure.axes, rows, strict=True):
        written = [one.get_text() for one in axes.texts]
        assert written == [*(bar.label for bar in row.bars), row.title]
        assert [one.get_text() for one in axes.get_yticklabels()] == [bar.name for bar in row.bars]
        assert [bar.get_width() for bar in axes.patches] == [bar.ms for bar in row.bars]


def test_no_text_covers_another_and_all_are_inside_the_picture(rows: list[Panel]) -> None:
    figure = drawn(rows)
    found = boxes(figure)
    assert [pair for pair in itertools.combinations(found, 2) if covers(found[pair[0]], found[pair[1]])] == []
    assert [name for name, box in found.items() if not figure.bbox.containsx(box.x1) or box.x0 < 0] == []
    assert [name for name, box in found.items() if not figure.bbox.containsy(box.y1) or box.y0 < 0] == []


def test_no_text_covers_a_bar(rows: list[Panel]) -> None:
    figure = drawn(rows)
    bars = [bar.get_window_extent() for axes in figure.axes for bar in axes.patches]
    assert [name for name, box in boxes(figure).items() if any(covers(box, bar) for bar in bars)] == []


def test_kinds_differ_in_grey() -> None:
    def grey(colour: str) -> float:
        return sum(part * weight for part, weight in zip(to_rgb(colour), (0.299, 0.587, 0.114), strict=True))

    shades = sorted(grey(colour) for colour in COLOURS.values())
    assert min(b - a for a, b in itertools.pairwise(shades)) > 0.15
    assert shades[-1] < 0.95, "a bar must differ from the paper"


def test_picture_of_the_report_is_narrow_and_its_letters_are_large() -> None:
    figure = drawn(panels(STORES, TRAINING))
    width_in, _ = figure.get_size_inches()
    assert width_in <= 5
    assert min(one.get_fontsize() for one in texts(figure)) >= 9.5
