"""Progress bars for long work."""

from typing import Any

from tqdm.auto import tqdm


class _Silent:
    """A bar that shows nothing."""

    def update(self, count: int = 1) -> None: ...

    def set_postfix(self, **values: Any) -> None: ...

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


def progress_bar(title: str, unit: str, total: int | None, *, shown: bool) -> Any:
    """Returns a context that is a progress bar.

    One that is not shown is none of tqdm's: those take a lock of the whole process, which Ctrl-C at the wrong moment
    would leave locked for all other threads.

    Examples:
        >>> with progress_bar("work", "step", 3, shown=False) as bar:
        ...     bar.update()
    """
    return tqdm(total=total, desc=title, unit=unit, leave=False) if shown else _Silent()
