"""What a conversion tells: a table of what becomes of what, and how far it is."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megads.convert.run import Mapped
from megads.convert.source import Kind, Report, Source

_LAYER = re.compile(r"^blocks\.(\d+)\.")


def summary(source: Source, table: Sequence[Mapped], *, every: bool) -> str:
    """A row per tensor of the weights, of the blocks those of the first one unless `every`."""
    model = source.model
    head = (
        f"{source.path}: {source.format}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, step {source.trained.step}, holds "
        f"{', '.join(source.kinds)}\n"
    )
    head += "".join(f"note: {note}\n" for note in source.notes)
    rows = Table("tensor", "shape", "type", "from", box=None, pad_edge=False)
    for mapped in table:
        layer = _LAYER.match(mapped.name)
        if mapped.kind != "param" or (layer and layer[1] != "0" and not every):
            continue
        more = f" and {len(mapped.origins) - 2} more" if len(mapped.origins) > 2 else ""
        name = _LAYER.sub("blocks.*.", mapped.name) if layer and not every else mapped.name
        shape, dtype = "x".join(map(str, mapped.shape)), str(mapped.dtype).removeprefix("torch.")
        rows.add_row(name, shape, dtype, ", ".join(mapped.origins[:2]) + more)
    text = io.StringIO()
    Console(file=text, width=160, markup=False, highlight=False).print(rows)
    return head + "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@contextlib.contextmanager
def progress(total: int) -> Iterator[Report]:
    """A bar that a terminal shows, and the report that moves it."""
    columns = (TextColumn("converting"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def report(kind: Kind, name: str) -> None:
            bar.advance(task)

        yield report
