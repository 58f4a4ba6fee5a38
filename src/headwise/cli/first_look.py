"""The first look in a terminal of 80 columns, with colours or without."""

from __future__ import annotations

from rich import box
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headwise.reports.first_look import Measure, measures
from headwise.reports.pictures import css, ink
from headwise.studies.first_look import FirstLook


def show(result: FirstLook, console: Console) -> None:
    """What was read, whether the layers are equal, every head, and those that stand out."""
    console.print(
        f"{result.model}, {result.num_layers} layers of {result.num_heads} heads, has read "
        f"{len(result.tokens)} tokens:\n{result.title}, {result.passage}.\n"
    )
    console.print(_verdict(result))
    console.print(_equalities(result))
    console.print(
        "Every head: a row is a layer, a column a head. Weights in per cent, entropy\n"
        f"in per cent of looking at all tokens evenly ({result.even_entropy:.2f} nats).\n"
    )
    pictures: list[RenderableType] = [_picture(result, measure) for measure in measures(result)]
    console.print(Columns(pictures, padding=(0, 2)))
    console.print(_stand_out(result))


def _verdict(result: FirstLook) -> Text:
    if result.equal:
        return Text.assemble(
            ("The same function. ", "bold green"),
            f"In all {result.num_layers} layers MultiheadAttention, with the weights of\n"
            f"{result.reference},\n"
            "gives its output within the error budget. Shares of the budget, at most 1:",
        )
    return Text.assemble(
        ("Not the same function. ", "bold red"),
        f"{result.reference},\n"
        "MultiheadAttention with its weights, or AttentionMatrix is outside the error budget.\n"
        "Shares of the budget, at most 1 within it:",
    )


def _equalities(result: FirstLook) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "drop-in error", "allowed", "drop-in", "reference", "A @ v"):
        table.add_column(name, justify="right")
    for row in result.equalities:
        shares = (row.drop_in.ratio, row.reference.ratio, row.matrix.ratio)
        table.add_row(
            str(row.layer),
            f"{row.drop_in.error:.1e}",
            f"{row.drop_in.allowed:.1e}",
            *(f"{share:.2f}" for share in shares),
        )
    return table


def _picture(result: FirstLook, measure: Measure) -> Text:
    """Layers x heads in per cent: coloured where the terminal can, readable where it cannot."""
    picture = Text(f"{measure.label}\n")
    picture.append("  " + "".join(f"{head:3d}" for head in range(result.num_heads)), "dim")
    for layer, row in enumerate(result.grid(measure.key)):
        picture.append(f"\n{layer} ", "dim")
        for value in row:
            colour = measure.colour(value)
            style = Style(color=ink(colour), bgcolor=css(colour))
            picture.append(f"{100 * value / measure.full:3.0f}", style)
    return picture.append("\n")


def _stand_out(result: FirstLook) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("heads that stand out")
    for name in ("layer", "head", "nats", "prev.", "first", "sep."):
        table.add_column(name, justify="right")
    for shown in result.close_ups:
        head = result.head(shown.layer, shown.head)
        values = (measure.long(getattr(head, measure.key)) for measure in measures(result))
        # Text, not str: in [SEP] rich would see markup.
        reasons = Text("\n".join(shown.reasons))
        table.add_row(reasons, str(shown.layer), str(shown.head), *values)
    return table
