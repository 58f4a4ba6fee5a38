"""Ways to divide one layer over ranks: heads, all-to-all, gathered keys, ring, and mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.sharding.costs.model_sizes import ModelSizes

GROUPS = ("heads", "all-to-all", "gather", "ring")
# Words of `attend(by=...)`: the all-to-all hands each rank all tokens of some heads.
ATTEND_BY = {"all-to-all": "heads", "gather": "gather", "ring": "ring"}


@dataclass(frozen=True, kw_only=True)
class ShardingWay:
    """Number of ranks of each group; their product is the number of GPUs.

    The groups are nested: ranks of ``heads`` are neighbours, those of ``ring`` the farthest apart.

    Attributes:
        heads: ranks that hold different heads of the same tokens.
        all_to_all: ranks that hold different tokens, and exchange them for heads.
        gather: ranks that hold different tokens, and gather the keys and values of all.
        ring: ranks that hold different tokens, and pass keys and values around.
    """

    heads: int = 1
    all_to_all: int = 1
    gather: int = 1
    ring: int = 1

    @property
    def groups(self) -> dict[str, int]:
        """Ranks of each group, the nearest ranks first; groups of one rank are left out."""
        counts = (self.heads, self.all_to_all, self.gather, self.ring)
        return {name: n for name, n in zip(GROUPS, counts, strict=True) if n > 1}

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.heads * self.token_ranks

    @property
    def token_ranks(self) -> int:
        """Ranks over which the tokens are divided."""
        return self.all_to_all * self.gather * self.ring

    @property
    def kind(self) -> str:
        """Names of the groups, such as "heads x ring"; "one GPU" without any."""
        return " x ".join(self.groups) or "one GPU"

    @property
    def is_in_headwise(self) -> bool:
        """True unless the tokens are divided in two ways at once, which `attend` does not do."""
        return len(self.groups.keys() & ATTEND_BY.keys()) < 2

    def groups_across_nodes(self, gpus_of_a_node: int) -> set[str]:
        """Return the groups whose ranks are not all in one node."""
        across, block = set(), 1
        for name, count in self.groups.items():
            block *= count
            if self.gpus > gpus_of_a_node and gpus_of_a_node % block:
                across.add(name)
        return across

    def __str__(self) -> str:
        return " x ".join(f"{name} {count}" for name, count in self.groups.items()) or "one GPU"


def ways_over(gpus: int) -> Iterator[ShardingWay]:
    """Yield every way to divide a layer over this many GPUs, whether its heads divide or not."""
    for heads in _list_divisors(gpus):
        for all_to_all in _list_divisors(gpus // heads):
            rest = gpus // heads // all_to_all
            near = {"heads": heads, "all_to_all": all_to_all}
            yield ShardingWay(**near, gather=rest)
            if rest > 1:
                yield ShardingWay(**near, ring=rest)


def find_refusal(way: ShardingWay, sizes: ModelSizes, context: int) -> str | None:
    """Return why a model cannot be divided in this way; None if it can."""
    if reason := _describe_undivided_heads("heads", sizes.heads, sizes.kv_heads, way.heads):
        return reason
    heads, kv_heads = sizes.heads // way.heads, max(sizes.kv_heads // way.heads, 1)
    if reason := _describe_undivided_heads("all-to-all", heads, kv_heads, way.all_to_all):
        return reason
    if context < way.token_ranks:
        return f"{context} tokens are fewer than {way.token_ranks} ranks"
    return None


def _describe_undivided_heads(group: str, heads: int, kv_heads: int, ranks: int) -> str | None:
    if heads % ranks:
        return f"{group} {ranks} does not divide {heads} query heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{group} {ranks} neither divides {kv_heads} kv heads nor is a multiple of them"
    return None


def _list_divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
