"""Writes the pages of the site: the documents, a page for each public module, and the table of contents.

The documents stay Markdown that reads well on the forge. Here they are copied, and links that leave ``docs/`` become
links to the forge.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FORGE = "https://github.com/paceline/paceline/blob/main"

#: Titles of the table of contents, and their pages; a page that stands nowhere comes under the second title.
CONTENTS: dict[str, list[str]] = {
    "Ten minutes with": ["tutorials/*"],
    "Guides": [
        *["stores", "launching", "launching/*", "observing", "saving"],
        *["weights", "unequal", "slow-networks", "planning", "mistakes", "failures", "security"],
    ],
    "Coming from": ["pytorch", "ddp", "horovod", "mxnet"],
    "Reference": ["reference/*", "settings", "extending", "changes", "releases", "reporting"],
    "Measured": ["benchmarks", "unequal-measured", "examples"],
    "Architecture": ["architecture", "architecture/*", "decisions", "decisions/*", "assumptions", "contributing"],
}

#: Texts of the project's root, and their names on the site.
_OF_ROOT = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changes",
    "SECURITY.md": "reporting",
}

_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)")


def write(target: Path) -> None:
    """Write all pages to a folder, which is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("site", "__pycache__"))
    for path in target.rglob("*.md"):
        path.write_text(with_links(path.read_text(), f"docs/{path.relative_to(target)}"))
    for source, name in _OF_ROOT.items():
        (target / f"{name}.md").write_text(with_links((ROOT / source).read_text(), source))
    (target / "reference").mkdir()
    for page in references():
        (target / f"reference/{page.name}.md").write_text(page.text())
    with (target / "index.md").open("a") as index:
        index.write(contents(target))


def with_links(text: str, source: str) -> str:
    """Return a document with links that work on the site.

    Args:
        text: Markdown.
        source: the document's path in the repository.
    """
    here = posixpath.dirname(page_of(source) or source)

    def there(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        page = page_of(path)
        link = f"{FORGE}/{path}" if page is None else posixpath.relpath(page, here or ".")
        return f"{found[1]}{link}{found[3] or ''})"

    return _LINK.sub(there, text)


def page_of(path: str) -> str | None:
    """Return where a file of the repository is on the site; None: only on the forge."""
    if path in _OF_ROOT:
        return f"{_OF_ROOT[path]}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None


def public_modules() -> Iterator[ModuleType]:
    """Yield paceline and all modules that its public names, and theirs, refer to."""
    waiting, seen = ["paceline", "paceline.lightning"], set()
    while waiting:
        module = importlib.import_module(waiting.pop(0))
        if module.__name__ not in seen:
            seen.add(module.__name__)
            yield module
        values = (getattr(module, name) for name in getattr(module, "__all__", ()))
        found = {value.__name__ for value in values if isinstance(value, ModuleType)}
        waiting += sorted(one for one in found - seen if one.startswith("paceline."))


@dataclass
class Reference:
    """The page of a public module.

    Attributes:
        name: of the module.
        described: full names of the classes and functions that this page describes.
        elsewhere: the other public names: a constant's value, or where the object is described.
    """

    name: str
    described: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the page."""
        leave_out = f"   :exclude-members: {', '.join(self.elsewhere)}\n" if self.elsewhere else ""
        text = f"# {self.name}\n\n```{{eval-rst}}\n.. automodule:: {self.name}\n   :members:\n{leave_out}```\n"
        rows = "\n".join(f"| `{member}` | {where} |" for member, where in self.elsewhere.items())
        return f"{text}\n| name | is |\n|---|---|\n{rows}\n" if self.elsewhere else text


def references() -> Iterator[Reference]:
    """Yield the page of each public module. An object is described on the first page that has it."""
    described: dict[int, str] = {}
    for module in public_modules():
        page = Reference(module.__name__)
        for member in getattr(module, "__all__", ()):
            value = getattr(module, member)
            if isinstance(value, ModuleType):
                page.elsewhere[member] = f"{{py:mod}}`{value.__name__}`"
            elif isinstance(value, functools.partial) or not (inspect.isclass(value) or inspect.isroutine(value)):
                page.elsewhere[member] = f"`{value!r}`"
            elif not value.__module__.startswith("paceline"):
                page.elsewhere[member] = f"`{value.__module__}.{value.__qualname__}`"
            elif id(value) in described:
                page.elsewhere[member] = f"{{py:obj}}`{described[id(value)]}`"
            else:
                described[id(value)] = f"{page.name}.{member}"
                page.described.append(described[id(value)])
        yield page


def contents(target: Path) -> str:
    """Return the table of contents of all pages."""
    pages = sorted(str(path.relative_to(target).with_suffix("")) for path in target.rglob("*.md"))
    patterns = [one for listed in CONTENTS.values() for one in listed]
    rest = [one for one in pages if one != "index" and not any(Path(one).match(pattern) for pattern in patterns)]
    text = ""
    for number, (title, listed) in enumerate(CONTENTS.items()):
        lines = "\n".join([*listed, *(rest if number == 1 else [])])
        text += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{lines}\n```\n"
    return text


def with_lists(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn Markdown's tables in a docstring into those of reStructuredText; an event of autodoc."""
    found = list(lines)
    lines.clear()
    for number, line in enumerate(found):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            lines.append(line)
        elif not set(line) <= set("|- "):
            if not (number and found[number - 1].lstrip().startswith("|")):
                lines += [".. list-table::", "   :header-rows: 1", ""]
            lines += [f"   {'* -' if index == 0 else '  -'} {cell}" for index, cell in enumerate(cells)]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
