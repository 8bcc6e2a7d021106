"""Tables, figures and words → one HTML page that needs nothing outside itself.

A page is a template that extends `base.html.j2`, and takes tables and plates from `parts.html.j2`. What it is given is
escaped, whoever wrote it.
"""

import base64
from dataclasses import dataclass
from typing import Any

import jinja2


@dataclass(frozen=True)
class Grid:
    """A table as text; `bold` marks cells, by row and column."""

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[tuple[int, int]] = frozenset()

    def transposed(self) -> "Grid":
        """Returns the same table with rows as columns."""
        (*header,), *rows = zip(self.header, *self.rows, strict=True)
        return Grid(header, [list(row) for row in rows], frozenset((j - 1, i + 1) for i, j in self.bold))


def embed(content: bytes, kind: str) -> str:
    """Returns an image as a data URI, such as of kind "png" or "svg+xml".

    Examples:
        >>> embed(b"<svg/>", "svg+xml")
        'data:image/svg+xml;base64,PHN2Zy8+'
    """
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def render_page(package: str, template: str, **content: Any) -> str:
    """Renders a template that stands in a package, with what is given escaped."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in (package, "stochbn.pages")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content) + "\n"
