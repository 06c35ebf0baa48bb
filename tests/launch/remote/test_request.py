"""What the launcher's shell gives to processes on other hosts."""

from __future__ import annotations

from paceline.launch.remote import forwarded, kept_back


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


def test_variables_that_are_kept_back_are_those_that_a_script_may_miss() -> None:
    environ = {"DATA": "/data", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/home/ada", "NCCL_DEBUG": "INFO", "RANK": "0"}
    assert kept_back(environ) == {"DATA", "CUDA_VISIBLE_DEVICES"}
