"""The command that serves a page to draw on."""

import webbrowser
from typing import Annotated

import typer

from stochbn.cli.console import console, say
from stochbn.cli.options import Threads


def play(
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine's own let others in.")] = (
        "127.0.0.1"
    ),
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
    threads: Threads = 1,  # its network is tiny: more threads would only wait for each other
) -> None:
    """Serves a page on which you draw, and see what 256 networks say.

    They are drawn from the demo's first network, which knows digits and no letters. The page shows their mean, how they
    vote, how much of the doubt is their disagreement, and whether a rule with a guarantee would answer or abstain.
    Nothing leaves this machine, and the page needs nothing from the network.

    Needs: `pip install 'stochbn[play]'`, and the network, which is trained in about a minute if it is missing.

    Next: open the address that it prints, and draw a 3, then an A. Ctrl-C ends it.

    Example: `stochbn play --open`
    """
    from stochbn.play.server import listen, make_app, serve  # first: it names the extra that is missing

    with listen(host, port) as taken:  # before minutes of training
        from stochbn.play.panel import load_panel

        app = make_app(load_panel(console))
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{taken.getsockname()[1]}/"
        say(f"Draw at {address} (Ctrl-C ends it)")
        if open_page:
            webbrowser.open(address)
        try:
            serve(app, taken)
        except KeyboardInterrupt:
            say("Stopped.")
