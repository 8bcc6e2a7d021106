"""The page, and the answers that it asks for: `/about` once, `/answer` for strokes, `/example` for an image."""

import importlib.resources
import json
import random
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from stochbn.play.panel import Panel
from stochbn.play.strokes import draw_image, parse_strokes

MAX_BYTES = 2**20  # of a request
HEADERS = {
    # The page has its style and script in it, and asks nobody but this server.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(panel: Panel) -> Starlette:
    """Returns the web application for a panel of networks.

    It answers its own page alone: other pages that a browser has open can send no drawings here.
    """
    page = importlib.resources.files("stochbn.play").joinpath("page.html").read_text("utf-8")

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    async def describe(request: Request) -> Response:
        return JSONResponse(panel.describe(), headers=HEADERS)

    async def answer(request: Request) -> Response:
        try:
            if request.headers.get("content-type") != "application/json":  # which browsers let no other page send
                raise ValueError("Expected a drawing as application/json. Open the page of stochbn play.")
            strokes = parse_strokes(json.loads(await _read(request)))
        except (ValueError, RecursionError) as error:  # of JSON too
            return JSONResponse({"error": str(error)}, 422, headers=HEADERS)
        # In a thread, as the page is to be served meanwhile; the predictor takes any number of them.
        found = await run_in_threadpool(lambda: panel.answer(draw_image(strokes)))
        return JSONResponse(found, headers=HEADERS)

    async def show_example(request: Request) -> Response:
        kind = request.query_params.get("kind", "")
        if kind not in ("digit", "letter"):
            return JSONResponse({"error": "Expected kind=digit or kind=letter."}, 422, headers=HEADERS)
        found = await run_in_threadpool(panel.example, kind, random.randrange(2**30))
        return JSONResponse(found, headers=HEADERS)

    routes = [
        Route("/", show_page),
        Route("/about", describe),
        Route("/answer", answer, methods=["POST"]),
        Route("/example", show_example),
    ]
    return Starlette(routes=routes)


async def _read(request: Request) -> bytes:
    """Reads a request's body, or refuses one that is too long before all of it is in memory."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"Expected a drawing of at most {MAX_BYTES} bytes, got more. Clear it.")
    return bytes(body)


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, 0 for any free one, from which on connections wait to be served.

    Raises:
        ValueError: Somebody else has it, or the host is none of this machine's.
    """
    taken = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's connections may linger
        taken.bind(address)
        taken.listen()
    except OSError as error:
        if taken is not None:
            taken.close()
        raise ValueError(
            f"Expected to listen at port {port} of {host}, got: {error.strerror or error}. Pass another --port, or 0 "
            "for any that is free."
        ) from error
    return taken


def serve(app: Any, taken: socket.socket) -> None:
    """Serves an application at a port until it is interrupted."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", limit_concurrency=32)
    uvicorn.Server(config).run(sockets=[taken])
