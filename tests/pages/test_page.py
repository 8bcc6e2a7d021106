import jinja2
import pytest

from stochbn.pages import page
from stochbn.pages.page import Grid, embed, render_page

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>'


@pytest.fixture
def render(monkeypatch):
    """Renders the text of a template that may extend the base."""

    def render(text, **content):
        templates = {"here.html.j2": text}
        base = jinja2.PackageLoader("stochbn.pages", "")
        monkeypatch.setattr(page.jinja2, "ChoiceLoader", lambda loaders: jinja2.FunctionLoader(load))

        def load(name):
            return templates[name] if name in templates else base.get_source(jinja2.Environment(), name)[0]

        return render_page("stochbn.pages", "here.html.j2", **content)

    return render


TABLE = '{% import "parts.html.j2" as parts %}{{ parts.table(grid, caption) }}'


def test_deviations_and_intervals_have_a_line_of_their_own(render):
    grid = Grid(["", "NLL", "Error"], [["SBN", "0.1 ± 0.2", "3 (1 to 4)"], ["a ± b", "—", "x (y"]], frozenset({(0, 1)}))
    text = render(TABLE, grid=grid, caption="c")
    assert "<td><strong>0.1 <small>± 0.2</small></strong></td><td>3 <small>1 to 4</small></td>" in text
    assert '<th scope="row">a ± b</th><td>—</td><td>x (y</td>' in text


def test_what_is_given_is_escaped(render):
    grid = Grid([HOSTILE], [[HOSTILE, f"1 ± {HOSTILE}", f"2 ({HOSTILE})"]])
    text = render(TABLE, grid=grid, caption=HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;") == 6  # the caption twice: it names the region too


def test_a_name_that_a_template_lacks_is_an_error(render):
    with pytest.raises(jinja2.UndefinedError, match="grid"):
        render(TABLE, caption="c")


def test_a_transposed_table_keeps_its_bold_cells():
    grid = Grid(["", "a", "b"], [["x", "1", "2"]], frozenset({(0, 2)}))
    assert grid.transposed() == Grid(["", "x"], [["a", "1"], ["b", "2"]], frozenset({(1, 1)}))
    assert grid.transposed().transposed() == grid


def test_an_image_is_embedded():
    assert embed(b"\x89PNG", "png") == "data:image/png;base64,iVBORw=="
