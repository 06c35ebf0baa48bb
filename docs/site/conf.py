"""Settings of Sphinx for the site that ``make docs`` builds."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

import paceline
from docs.site.pages import references, with_lists

project = "paceline"
version = release = paceline.__version__
copyright = "the paceline authors"

lexers["mermaid"] = TextLexer()  # the forge makes a picture of it

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "paceline"
html_show_sphinx = False

# Headings get the anchors that they have on the forge.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_use_rtype = False


def check(app: Any, error: Exception | None) -> None:
    """Fail where a public name has no place in the reference."""
    found = app.env.domaindata["py"]["objects"]
    missing = [name for page in references() for name in page.described if name not in found]
    if missing and error is None:
        raise RuntimeError(f"public names without a place in the reference: {', '.join(missing)}")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", with_lists)
    app.connect("build-finished", check)
