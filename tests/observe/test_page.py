"""The page as a file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from paceline.observe.page import embedded, page, policy

NASTY = "</script><script>alert(1)</script><!--<b>&amp;\u2028\u2029'\"\\"


class Parts(HTMLParser):
    """Reads HTML as a browser does, and keeps tags and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and len(self.scripts) < self.count:
            self.scripts.append(data)

    @property
    def count(self) -> int:
        return sum(tag == "script" for tag, _ in self.tags)


def test_report_carries_any_text_and_none_of_it_is_read_as_html() -> None:
    plain, report = Parts(page().decode()), Parts(page({"host": NASTY, NASTY: [NASTY]}).decode())
    assert report.tags == plain.tags
    assert json.loads(report.scripts[0]) == {"host": NASTY, NASTY: [NASTY]}
    assert plain.scripts[0] == "null"
    assert report.scripts[1] == plain.scripts[1]


def test_embedded_data_has_no_sign_that_html_or_scripts_take_for_their_own() -> None:
    assert not set(embedded([NASTY])) & set("<>&\u2028\u2029")
    assert json.loads(embedded([NASTY])) == [NASTY]


@pytest.mark.parametrize("kind", ["script", "style"])
def test_policy_allows_the_pages_own_script_and_style_and_nothing_else(kind: str) -> None:
    for text in (page().decode(), page({"a": 1}).decode()):
        [own] = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy()
        assert policy() in text
    assert "default-src 'none'" in policy()
    assert "unsafe" not in policy()


def test_page_asks_no_other_host_and_sets_no_text_as_html() -> None:
    text = page().decode()
    assert re.findall(r"https?://|//[a-z]+\.|@import|url\(", text) == []
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "setAttribute",
    ):
        assert way not in text
    assert not re.search(r'\bon[a-z]+="', text)
