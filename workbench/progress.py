"""How far a long job is: a bar on stderr, in terminals and notebooks alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]  # what is being done; the share that is done, 0 to 1


def silent(_what: str, _done: float) -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a `Progress` that draws one bar on stderr while the block lasts; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield silent
        return
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)
