"""Shows what scripts/infer.py computed: tables in the terminal, and a heat map."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engram_jax import NgramHashState

TOKENS_PER_PANEL = 48
MOST_PANELS = 4


class Steps:
    """Shows each step of the work with its time: a bar, or a line in a log."""

    def __init__(self, console: Console) -> None:
        """Takes the terminal, or whatever the output goes to."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<38}"),
            BarColumn(24),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Steps:
        """Starts to show."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def finish(self) -> None:
        """Ends the last step, and with it the bars."""
        self.end()
        self._progress.stop()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops to show; a step that did not end stays as it is."""
        self._progress.stop()

    def begin(self, description: str) -> None:
        """Ends the step before and begins another."""
        self.end()
        self._task = self._progress.add_task(description, total=None)

    def update(self, done: int, total: int) -> None:
        """Tells how far the step has come."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def end(self) -> None:
        """Ends the step."""
        if self._task is None:
            return
        task = self._progress.tasks[self._task]
        total = task.total or 1
        self._progress.update(task.id, completed=total, total=total)
        self._progress.stop_task(task.id)
        if not self._console.is_terminal:
            took = f"{task.elapsed or 0:7.1f} s"
            self._console.print(f"{task.description:<38}{took}", highlight=False)
        self._task = None


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Gives a token's text with its blanks made visible."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character's bytes
        text = tokenizer.id_to_token(token_id) or text
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")


def rows_table(
    title: str,
    tokenizer: Tokenizer,
    ids: np.ndarray,
    hash_state: NgramHashState,
) -> Table:
    """Lists tokens, their compressed ids, and the first head's row of each n-gram.

    Args:
        title: of the table.
        tokenizer: to show the tokens with.
        ids: a text's first token ids, int32 [T].
        hash_state: its layout tells the rows.

    Returns:
        The table, narrow enough for 80 columns.
    """
    layout = hash_state.layout
    hashes = np.asarray(hash_state.hash_sequence(ids))
    compressed = np.asarray(hash_state.token_map[...])[ids]
    first_seen: dict[int, int] = {}
    read: set[int] = set()
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("#", justify="right", style="dim")
    table.add_column("token", no_wrap=True, max_width=12)
    table.add_column("id", justify="right")
    table.add_column("compr.", justify="right")
    table.add_column("same as", justify="right", style="green")
    columns = [
        (layer, size)
        for layer in range(layout.num_layers)
        for size in range(2, layout.max_ngram_size + 1)
    ][:4]
    for layer, size in columns:
        heading = f"layer {layout.layer_ids[layer]}\n{size}-gram"
        table.add_column(heading, justify="right")
    for place, token_id in enumerate(ids.tolist()):
        key = int(compressed[place])
        earlier = first_seen.setdefault(key, place)
        rows = [
            int(hashes[place, layer, (size - 2) * layout.n_heads])
            for layer, size in columns
        ]
        table.add_row(
            str(place),
            token_text(tokenizer, token_id),
            str(token_id),
            str(key),
            f"#{earlier}" if earlier < place else "",
            # A row that an earlier token read is bold: the n-gram is the same.
            *(f"[bold green]{row}[/]" if row in read else str(row) for row in rows),
        )
        read.update(rows)
    return table


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Lists names and values."""
    table = Table(
        title=title, title_justify="left", box=None, show_header=False, pad_edge=False
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for fact in facts:
        table.add_row(*fact)
    return table


def bytes_text(count: float) -> str:
    """Writes a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"


def draw_gates(
    path: Path,
    gates: np.ndarray,
    texts: list[str],
    layer_ids: tuple[int, ...],
    note: str,
) -> int:
    """Writes the heat map of the gates by token, layer and stream.

    Args:
        path: the PNG file to write.
        gates: float32 [T, L, M], in (0, 1).
        texts: the tokens, [T].
        layer_ids: the layers, [L].
        note: what to know about them, below the title.

    Returns:
        How many tokens are shown: the first ones, as far as the picture goes.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    shown = min(len(texts), TOKENS_PER_PANEL * MOST_PANELS)
    _, layers, streams = gates.shape
    panels = -(-shown // TOKENS_PER_PANEL)
    figure, axes = plt.subplots(
        panels,
        1,
        figsize=(13, 0.6 + panels * (0.95 + 0.2 * layers * streams)),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for panel, axis in enumerate(axes[:, 0]):
        start = panel * TOKENS_PER_PANEL
        stop = min(start + TOKENS_PER_PANEL, shown)
        values = gates[start:stop].reshape(stop - start, layers * streams).T
        image = axis.imshow(
            values, vmin=0, vmax=1, cmap="RdBu_r", aspect="auto", interpolation="none"
        )
        axis.set_xlim(-0.5, TOKENS_PER_PANEL - 0.5)
        axis.set_xticks(
            range(stop - start),
            [_drawable(text) for text in texts[start:stop]],
            rotation=90,
            fontsize=8,
            family="monospace",
        )
        axis.set_yticks(
            range(layers * streams),
            [
                f"layer {layer}, stream {m}"
                for layer in layer_ids
                for m in range(streams)
            ],
            fontsize=7,
        )
        for layer in range(1, layers):
            axis.axhline(layer * streams - 0.5, color="black", linewidth=1.5)
        axis.spines[:].set_visible(False)
    figure.suptitle(
        "Gates: how much of its memory each token lets into each residual stream\n"
        f"({note})",
        fontsize=12,
    )
    assert image is not None  # a text has at least one token
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    bar.set_label("gate (0: shut, 1: open)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return shown


def _drawable(text: str) -> str:
    """Replaces characters that Matplotlib's own font does not have."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans Mono"))
    known = font.get_charmap()
    drawn = "".join(
        character if ord(character) in known else f"U+{ord(character):X}"
        for character in text.replace("$", r"\$")
    )
    return drawn if len(drawn) <= 14 else drawn[:13] + "…"
