"""The page in a real browser: strokes by mouse and touch are answered, at both widths, light and dark."""

import pytest

import chromium

pytestmark = pytest.mark.skipif(not chromium.PATH, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser():
    with chromium.open_page() as page:
        yield page


@pytest.fixture(
    params=[(1280, False), (1280, True), (390, False), (390, True)], ids=lambda size: f"{size[0]}-{'dark' * size[1]}"
)
def page(browser, address, request):
    width, dark = request.param
    browser.problems.clear()
    browser.asked.clear()
    browser.resize(width, 844 if width < 500 else 900, mobile=width < 500, dark=dark)
    browser.call("Page.navigate", url=f"{address}/")
    browser.wait("document.querySelectorAll('#votes i').length === 256")
    browser.width = width
    yield browser
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    assert not browser.problems
    assert all(url.startswith((f"{address}/", "data:")) for url in browser.asked)


def draw(page, strokes):
    """Draws with a finger on a phone, else with a mouse."""
    names = (
        ("touchStart", "touchMove", "touchEnd") if page.width < 500 else ("mousePressed", "mouseMoved", "mouseReleased")
    )
    box = page.run(
        "(({left, top, width}) => [left, top, width])(document.querySelector('#paper').getBoundingClientRect())"
    )
    for stroke in strokes:
        places = [{"x": box[0] + box[2] * x / 100, "y": box[1] + box[2] * y / 100} for x, y in stroke]
        for name, place in [(names[0], places[0]), *((names[1], p) for p in places), (names[2], places[-1])]:
            if name.startswith("touch"):
                page.call("Input.dispatchTouchEvent", type=name, touchPoints=[] if name == "touchEnd" else [place])
            else:
                page.call("Input.dispatchMouseEvent", type=name, **place, button="left", buttons=1, clickCount=1)


def text(page, name):
    return page.run(f"document.getElementById('{name}').textContent")


def test_a_digit_and_a_letter_are_drawn(page, drawn):
    draw(page, drawn["3"])
    page.wait("document.getElementById('title').textContent === 'The rule answers: 3'")
    assert "networks say 3." in text(page, "why")
    assert page.run("scrollY") == 0, "the finger draws, and does not scroll"
    assert page.run("document.querySelectorAll('#votes .rank0').length") > 200
    assert page.run("document.querySelector('#bars .rank0 b').textContent") == "3"
    page.run("document.getElementById('clear').click()")
    assert text(page, "title") == "Nothing drawn yet"
    assert page.run("document.querySelectorAll('#votes .rank0').length") == 0

    draw(page, drawn["A"])
    page.wait("document.getElementById('title').textContent === 'The rule abstains' && !asking")
    assert page.run("strokes.length") == 2
    shares = [float(text(page, name).strip("<> %")) for name in ("apart-share", "own-share")]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert page.run("document.getElementById('votes').getAttribute('aria-label')").startswith("Of 256 networks")
    page.run("document.getElementById('undo').click()")
    assert page.run("strokes.length") == 1
    page.wait("!asking")
    assert page.screenshot().startswith(b"\x89PNG")


def test_examples_need_no_pen(page):
    page.run("document.getElementById('glyph').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.wait("document.getElementById('why').textContent.includes('It was shown the letter')")
    page.wait("document.getElementById('spoken').textContent.includes('It was shown the letter')")
    page.run("document.getElementById('digit').click()")
    page.wait("document.getElementById('why').textContent.includes('It was shown a ')")


def test_what_cannot_be_answered_is_said(page, drawn):
    page.run("window.fetch = () => Promise.reject(new Error('gone'))")
    draw(page, drawn["1"])
    page.wait("document.getElementById('why').textContent.startsWith('The server does not answer.')")
