"""The counts of a model: what its config says, and what the caller does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headwise.checkpoints.config import Config, counts_of
from headwise.errors import OptionError


def known_counts(config: Config, given: Mapping[str, int | None], *, place: Path) -> dict[str, int]:
    """heads, kv_heads and so on, from both.

    Raises:
        OptionError: they contradict each other, or a count is below 1.
    """
    said = counts_of(config)
    wanted = {name: count for name, count in given.items() if count is not None}
    for name, count in wanted.items():
        if count < 1:
            raise OptionError(saw=f"{name} {count}", needed="1 or more", do="give the model's own")
        if said.get(name, count) != count:
            raise OptionError(
                saw=f"{name} {count}, where the config in {place} says {said[name]}",
                needed="one count: with another one, rows are moved to wrong places",
                do=f"leave out {{{name}}}, or mend the config",
                parameter=name,
            )
    return said | wanted
