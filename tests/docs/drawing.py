"""The drawing of the packages in docs/architecture.md, made from the imports: ``python -m tests.docs.drawing``."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_layers import ARROWS, top

DOCUMENT = Path(__file__).parents[2] / "docs/architecture.md"
#: Modules that are drawn as one box, by what is written in it.
TOGETHER = {
    "errors, config, ...": {"errors", "config", "exitcodes", "forks", "logs", "naming"},
    "placement, membership, ...": {"placement", "local_merge", "ranges", "membership", "agreement"},
    "tensors, keys, ...": {"tensors", "keys", "arguments", "batch_norm"},
}
_BLOCK = re.compile(r"```mermaid\nflowchart .*?```", re.DOTALL)

Graph = dict[str, set[str]]


def box_of(module: str) -> str:
    """Return what is written in the box of a module such as ``paceline.net.call``."""
    name = top(module)
    return next((text for text, names in TOGETHER.items() if name in names), name)


def imports() -> Graph:
    """Return which boxes each box imports from."""
    graph: Graph = {}
    for module, imported in ARROWS.items():
        if module == "paceline" or top(module) == "__main__":
            continue
        targets = graph.setdefault(box_of(module), set())
        targets |= {box_of(one) for one in imported if one != "paceline"} - {box_of(module)}
    return graph


def reduced(graph: Graph) -> Graph:
    """Leave out every arrow that follows from others."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = graph.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found

    return {
        box: {one for one in targets if not any(one in reachable(other) for other in targets - {one})}
        for box, targets in graph.items()
    }


def drawing() -> str:
    """Return the drawing as a fenced block of Mermaid."""
    graph = reduced(imports())
    name = {box: re.sub(r"\W+", "_", box).strip("_") for box in graph}
    boxes = [f'    {name[box]}["{box}"]' for box in sorted(graph)]
    arrows = [f"    {name[box]} --> {name[target]}" for box in sorted(graph) for target in sorted(graph[box])]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])


def drawn() -> str:
    """Return the drawing that the document has."""
    found = _BLOCK.search(DOCUMENT.read_text())
    return found.group() if found else ""


def main() -> None:
    """Put the drawing into the document."""
    text = DOCUMENT.read_text()
    assert len(_BLOCK.findall(text)) == 1, "docs/architecture.md has one flowchart"
    DOCUMENT.write_text(_BLOCK.sub(lambda _: drawing(), text))


if __name__ == "__main__":
    main()
