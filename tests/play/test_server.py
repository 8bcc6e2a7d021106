"""The server's answers, what it refuses, and that its page asks nobody else."""

import importlib.resources
import json
import re
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from benchmarks import play
from stochbn.play.server import MAX_BYTES, listen, make_app
from stochbn.play.strokes import draw_image, parse_strokes


@pytest.fixture(scope="module")
def client(panel):
    with TestClient(make_app(panel)) as client:
        yield client


def test_strokes_are_answered(client, panel, drawn):
    for strokes in drawn.values():
        answer = client.post("/answer", json=strokes)
        assert answer.status_code == 200
        assert answer.json() == json.loads(json.dumps(panel.answer(draw_image(parse_strokes(strokes)))))


def test_strokes_are_answered_to_many_at_once(address, drawn):
    def ask(name):
        request = urllib.request.Request(
            f"{address}/answer", json.dumps(drawn[name]).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["predicted"]

    names = [name for name in drawn if name.isdigit()] * 8
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, names)) == [int(name) for name in names]


def test_examples_and_what_is_said_about_them(client, panel):
    assert client.get("/about").json() == json.loads(json.dumps(panel.describe()))
    assert client.get("/example", params={"kind": "digit"}).json()["shown"] in "0123456789"
    assert client.get("/example", params={"kind": "letter"}).json()["shown"] in "ABCDEFGHIJ"
    for kind in ("", "<b>", "digits"):
        refused = client.get("/example", params={"kind": kind})
        assert (refused.status_code, refused.json()) == (422, {"error": "Expected kind=digit or kind=letter."})


def test_other_pages_send_nothing(client, drawn):
    """A browser lets another page post text and forms without asking, JSON not."""
    refused = client.post("/answer", content=json.dumps(drawn["0"]), headers={"Content-Type": "text/plain"})
    assert refused.status_code == 422
    assert "Expected a drawing as application/json" in refused.json()["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff", "codec can't decode"),
        (b"[[[NaN, 1]]]", "Expected strokes as lists of points"),
        (b"{}", "Expected strokes as lists of points"),
        (b"[" * 100_000, "recursion|nested"),
        (b" " * (MAX_BYTES + 1), "Expected a drawing of at most 1048576 bytes, got more"),
    ],
)
def test_what_is_no_drawing_is_a_sentence(client, body, message):
    refused = client.post("/answer", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 422
    assert re.search(message, refused.json()["error"])


def test_the_benchmark_asks_a_real_server(panel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play, "load_panel", lambda console, recipe: panel)
    monkeypatch.setattr(play, "NUM_POINTS", 5)
    play.main(tmp_path / "play.json")
    results = json.loads((tmp_path / "play.json").read_text())
    assert results["command"] == "python -m benchmarks.play"
    found = results["answer_seconds"]
    assert found["questions"] == 5 * play.NUM_DRAWINGS
    assert 0 < found["median"] <= found["p99"] <= found["longest"]
    assert results["target_met"] is (found["p99"] < 0.1)
    assert "milliseconds to answer a stroke, of 55" in capsys.readouterr().out


def test_other_addresses_and_methods_are_nothing(client):
    assert client.get("/answer").status_code == 405
    for path in ("/page.html", "/../server.py", "/about/x"):
        assert client.get(path).status_code == 404


def test_the_page_asks_nobody_else(client):
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)//\s.*$", "", answer.text))
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(", answer.text)  # text is text
    assert answer.text == importlib.resources.files("stochbn.play").joinpath("page.html").read_text("utf-8")


def test_a_port_in_use_is_a_sentence():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"Expected to listen at port {port} of 127.0.0.1, got: Address already in"
        ):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()  # free again


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])  # the second is nobody's, by RFC 5737
def test_a_host_that_is_not_ours_is_a_sentence(host, monkeypatch):
    if host.endswith("invalid"):  # without asking the network
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(unknown))
    with pytest.raises(ValueError, match=f"Expected to listen at port 8000 of {host}, got: .*Pass another --port"):
        listen(host, 8000)
