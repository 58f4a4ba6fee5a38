"""A scan as text for a terminal: a character for each head, and the heads that stand out."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict

from torch import Tensor

from headwise.scanning.readings import LayerScan, Readings

WIDTH = 80
MOST_ROWS = 32  # layers
MOST_HEADS = 64
MOST_LINES = 8  # of what stands out, of what is missing, of notes
LEVELS = "▁▂▃▄▅▆▇█"
NO_VALUE = "·"
HARD = "\N{NO-BREAK SPACE}"

# The picture shows the first of these that the scan has; otherwise its first number.
SHOWN = ("relative_entropy", "entropy", "effective_keys")
TOP = 3  # heads of each
LONGEST_NAME, SHORTEST_LABEL = 30, 12


def picture(scan: Readings) -> str:
    """The whole text: counts, layers x heads, heads that stand out, what is missing."""
    parts = [_counts(scan), *_heads(scan), *_extremes(scan), *_missing(scan), *_notes(scan)]
    return "\n".join(parts)


def _counts(scan: Readings) -> str:
    heads = sorted({layer.num_heads for layer in scan.layer_scans})
    each = f" of {heads[0]}" if heads else ""
    if len(heads) > 1:
        each += f" to {heads[-1]}"
    counts = [
        f"{many(len(scan.layers), 'layer')}{each}{' heads' if heads else ''}",
        many(len(scan.measured), "statistic"),
        many(scan.sequences, "sequence"),
        many(scan.tokens, "token"),
    ]
    # No line breaks within a count: textwrap leaves this space alone.
    told = f"HeadScan of {scan.model}: {', '.join(count.replace(' ', HARD) for count in counts)}"
    return textwrap.fill(told, WIDTH, subsequent_indent="  ").replace(HARD, " ")


# ---- layers x heads -----------------------------------------------------------------------------


def _heads(scan: Readings) -> list[str]:
    """A row for each layer, with its name where there is room."""
    name = next((name for name in SHOWN if name in scan.scalars), next(iter(scan.scalars), None))
    if name is None:
        return []
    values = scan[name]
    real = values[values.isfinite()]
    if not real.numel():
        return [f"{name}: no head has a value"]
    low, high = float(real.min()), float(real.max())
    shown = min(values.shape[1], MOST_HEADS)
    digits = len(str(len(scan.layers) - 1))
    lines = [f"{name}, from {low:.3g} {LEVELS[0]} to {high:.3g} {LEVELS[-1]}"]
    if shown < values.shape[1]:
        lines[0] += f"; {values.shape[1] - shown} more heads are left out"
    lines.append(f"{'':{digits}} {ruler(shown)}".rstrip())
    rows = []
    for index, layer in enumerate(scan.layer_scans):
        row = _row(values[index, :shown], layer, low, high)
        label = _label(layer, WIDTH - digits - shown - 3)
        rows.append(f"{index:{digits}} {row}  {label}".rstrip())
    if len(rows) > MOST_ROWS:  # the first and the last, and a line between them
        left_out = len(rows) - MOST_ROWS + 1
        first = MOST_ROWS // 2
        rows[first : first + left_out] = [f"{'':{digits}} … {many(left_out, 'layer')} left out"]
    return lines + rows


def _row(values: Tensor, layer: LayerScan, low: float, high: float) -> str:
    cells = [
        level((value - low) / ((high - low) or 1.0)) if low <= value <= high else NO_VALUE
        for value in values.tolist()[: layer.num_heads]
    ]
    return "".join(cells).ljust(len(values))


def level(share: float) -> str:
    """The bar of a share, which is held between 0 and 1."""
    return LEVELS[min(int(max(share, 0.0) * len(LEVELS)), len(LEVELS) - 1)]


def ruler(heads: int) -> str:
    """Every fifth head by its number."""
    return "".join(f"{head:<5}" for head in range(0, heads, 5))[:heads].rstrip()


def _label(layer: LayerScan, room: int) -> str:
    label = layer.name + (" (cross)" if layer.kind == "cross" else "")
    return _from_the_end(label, room) if room >= SHORTEST_LABEL else ""


def _from_the_end(text: str, room: int) -> str:
    """A name that is too long ends as it does: there, names differ most."""
    return text if len(text) <= room else "…" + text[1 - room :]


# ---- in words -----------------------------------------------------------------------------------


def _extremes(scan: Readings) -> list[str]:
    shares = [name for name in scan.known_for if scan.definition(name).drawn != "range"]
    names = shares or list(scan.scalars)
    width = min(max((len(name) for name in names), default=0), LONGEST_NAME)
    lines = []
    for name in names:
        found = scan.top(name, TOP)
        line = f"  {_from_the_end(name, width):{width}}"
        for head in found:
            entry = f"  {_short(head.value):>6} ({head.layer_index}, {head.head})"
            line += entry if len(line) + len(entry) <= WIDTH else ""
        if found:
            lines.append(line)
    return ["largest (layer, head):", *_elided(lines)] if lines else []


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _missing(scan: Readings) -> list[str]:
    """A line for each reason, with the statistics and the number of layers."""
    reasons = defaultdict[str, Counter[str]](Counter)
    for layer in scan.layer_scans:
        for name, reason in layer.missing.items():
            reasons[reason][name] += 1
    lines = []
    for reason, names in reasons.items():
        fewest, most = min(names.values()), max(names.values())
        where = f"{fewest} of" if fewest == most else f"{fewest} to {most} of"
        where = "all" if fewest == len(scan.layers) else f"{where} {len(scan.layers)}"
        lines.append(_wrapped(f"{', '.join(names)}: {reason} (in {where} layers)"))
    return ["missing:", *_elided(lines)] if lines else []


def _notes(scan: Readings) -> list[str]:
    lines = [_wrapped(note) for note in scan.notes]
    return ["notes:", *_elided(lines)] if lines else []


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _elided(lines: list[str]) -> list[str]:
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 1], f"  and {len(lines) - MOST_LINES + 1} more"]


def many(count: int, what: str) -> str:
    """``1 layer``, ``1,024 tokens``."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")
