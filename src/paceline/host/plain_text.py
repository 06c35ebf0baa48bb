"""Texts of users, hosts and other processes, made plain where they come in or are shown. Pure.

Such a text may hold what a terminal obeys: control characters, escape sequences, marks that turn the direction of
writing. It may hold what no message and no terminal can carry: lone surrogates, for bytes that are no UTF-8, as in the
name of a file. :func:`plain` shows both as escapes. Data is never made plain: a key whose name no message can carry is
refused.
"""

from __future__ import annotations

from unicodedata import category

#: Characters at which an error's text is cut.
LONGEST_TEXT = 4000


def plain(text: str, kept: str = "") -> str:
    """Return a text of printable characters and spaces. All others, but for those in ``kept``, are shown as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept or _is_space(one) else ascii(one)[1:-1] for one in text)


def _is_space(one: str) -> bool:
    return category(one) == "Zs"


def plain_lines(text: str) -> str:
    """Return a text of several lines that is plain, and no longer than an error's."""
    return plain(text[:LONGEST_TEXT], "\n\t")[:LONGEST_TEXT]


def text_of(error: BaseException) -> str:
    """Return the text of an exception, plain; also of one whose own text cannot be made."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - code of the user
        text = f"(its text cannot be made: __str__ raised {type(failure).__name__})"
    return plain_lines(text)


def described(error: BaseException) -> str:
    """Return the class of an exception and its text, plain: ``ValueError: too small``."""
    return plain_lines(f"{type(error).__name__}: {text_of(error)}".removesuffix(": "))
