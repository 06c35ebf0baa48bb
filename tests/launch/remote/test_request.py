"""What the launcher's shell gives to processes on other hosts."""

from __future__ import annotations

from paceline.launch.remote import forwarded


def test_proxies_are_known_under_both_names() -> None:
    environ = {
        "http_proxy": "p:1",
        "HTTPS_PROXY": "p:2",
        "no_proxy": "h1",
        "ALL_PROXY": "p:3",
        "EDITOR": "vi",
        "RANK": "1",
    }
    assert forwarded(environ) == {name: text for name, text in environ.items() if "proxy" in name.lower()}
