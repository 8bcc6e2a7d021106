"""Where the commands print."""

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Prints text as it is: no markup, no colours, and no line breaks that would cut a path in two."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
