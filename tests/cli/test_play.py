"""`stochbn play` takes its port first, needs its extra, and ends by Ctrl-C."""

import socket
import sys

import pytest

from stochbn.cli import play as module
from stochbn.play import panel, server


@pytest.fixture
def served(monkeypatch):
    """What was served, without networks, and a Ctrl-C at once."""
    found = []

    def serve(app, taken):
        found.append(taken.getsockname())
        raise KeyboardInterrupt

    monkeypatch.setattr(panel, "load_panel", lambda console: "networks")
    monkeypatch.setattr(server, "make_app", lambda networks: networks)
    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(module.webbrowser, "open", lambda address: found.append(address))
    return found


def test_it_says_where_to_draw_and_opens_nothing(run, served):
    code, out, err = run("play", port=0)
    assert (code, err) == (0, "")
    [(host, port)] = served
    assert host == "127.0.0.1"
    assert f"Draw at http://127.0.0.1:{port}/ (Ctrl-C ends it)\nStopped.\n" in out


def test_it_opens_the_page_if_asked(run, served):
    assert run("play", "--open", port=0)[0] == 0
    assert served[0] == f"http://127.0.0.1:{served[1][1]}/"


def test_a_port_in_use_is_known_before_any_training(refused, monkeypatch):
    monkeypatch.setattr(panel, "load_panel", lambda console: pytest.fail("it was trained"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refused("play", port=port)
    assert (
        f"Expected to listen at port {port} of 127.0.0.1, got: Address already in use. Pass another --port" in message
    )


@pytest.mark.parametrize("package", ["uvicorn", "starlette.applications"])
def test_without_the_extra_it_says_what_to_install(refused, monkeypatch, package):
    monkeypatch.delitem(sys.modules, "stochbn.play.server")
    monkeypatch.setitem(sys.modules, package, None)
    assert refused("play", port=0).endswith("Install with pip install 'stochbn[play]'.\n")


@pytest.mark.parametrize("port", [-1, 65536, "http"])
def test_what_is_no_port(refused, port):
    assert "Invalid value for '--port'" in refused("play", port=port)
