"""Every head statistic again, from the dense weights, by its formula.

Nothing of `headwise.scanning.statistics` is used, so that a mistake must be made twice to pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.function import stages

RANKS = 8


@dataclass(frozen=True)
class Seen:
    """One attention call, written down; ``real`` and ``tokens`` are those of the keys."""

    scores: Tensor
    weights: Tensor
    sink_logit: Tensor | None
    real_queries: Tensor
    real: Tensor
    own_key: int | None
    tokens: Tensor
    separators: Tensor
    specials: Tensor
    values: Tensor
    outputs: Tensor
    out_proj: Tensor
    residual: Tensor
    unembedding: Tensor
    samples: int

    @property
    def batch(self) -> int:
        return self.weights.shape[0]

    @property
    def heads(self) -> int:
        return self.weights.shape[1]

    @property
    def allowed(self) -> Tensor:
        return self.scores > -torch.inf

    def zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(self.heads, *sizes, dtype=self.weights.dtype)

    def logsumexp(self, b: int) -> Tensor:
        """(heads, queries), the sink included."""
        s = self.scores[b]
        if self.sink_logit is not None:
            s = torch.cat([s, self.sink_logit[:, None, None].expand(*s.shape[:2], 1)], -1)
        return torch.logsumexp(s, -1)

    def sink_share(self, b: int) -> Tensor:
        """(heads, queries)."""
        if self.sink_logit is None:
            return torch.zeros_like(self.weights[b, ..., 0])
        return (self.sink_logit[:, None] - self.logsumexp(b)).exp()

    def outcomes(self, b: int) -> Tensor:
        """(heads, queries, keys + 1): weights, and the sink's share."""
        return torch.cat([self.weights[b], self.sink_share(b)[..., None]], -1)

    def counted(self, b: int) -> Tensor:
        """(heads, queries): no padding, and something to attend to."""
        return self.real_queries[b] & self.allowed[b].any(-1)

    def sampled(self, b: int) -> Tensor:
        """The same at the middles of equal stretches of the sequence."""
        places = self.real_queries[b].nonzero().squeeze(1).tolist()
        n, few = len(places), self.samples
        nths = range(n) if n <= few else [math.floor((k + 0.5) * n / few) for k in range(few)]
        chosen = torch.zeros_like(self.real_queries[b])
        chosen[[places[nth] for nth in nths]] = True
        return self.counted(b) & chosen

    @property
    def own(self) -> Tensor:
        assert self.own_key is not None
        return torch.arange(self.weights.shape[2]) + self.own_key

    def first(self, b: int) -> int:
        return int(self.real[b].nonzero()[0])


Number = Callable[[Seen, int], Tensor]


def everywhere(seen: Seen, b: int) -> Tensor:
    return torch.ones_like(seen.real_queries[b])


def mean(number: Number, counts: Number = everywhere) -> Callable[[Seen], Tensor]:
    """The mean over queries of (heads, queries) numbers, over those that count."""

    def of(seen: Seen) -> Tensor:
        total, count = seen.zeros(), seen.zeros()
        for b in range(seen.batch):
            counted = seen.counted(b) & counts(seen, b)
            total += number(seen, b).where(counted, 0.0).sum(1)
            count += counted.sum(1)
        return total / count

    return of


# ---- spread ------------------------------------------------------------------------------------


def entropy_of(seen: Seen, b: int) -> Tensor:
    return torch.special.entr(seen.outcomes(b)).sum(-1)


def choices(seen: Seen, b: int) -> Tensor:
    return seen.allowed[b].sum(-1) + (seen.sink_logit is not None)


def relative_entropy(seen: Seen, b: int) -> Tensor:
    return entropy_of(seen, b) / choices(seen, b).to(seen.weights.dtype).log()


def participation(seen: Seen, b: int) -> Tensor:
    w = seen.weights[b]
    return w.sum(-1) ** 2 / (w**2).sum(-1)


def score_range(seen: Seen, b: int) -> Tensor:
    s = seen.scores[b]
    return s.amax(-1) - s.where(s > -torch.inf, torch.inf).amin(-1)


# ---- places ------------------------------------------------------------------------------------


def on_keys(chosen: Number) -> Number:
    """The weight on (keys,) or (queries, keys), times what is given for each."""
    return lambda seen, b: (seen.weights[b] * chosen(seen, b)).sum(-1)


def distances(seen: Seen, _: int) -> Tensor:
    return (torch.arange(seen.weights.shape[-1]) - seen.own[:, None]).abs()


def within(reach: int) -> Callable[[Seen], Tensor]:
    return mean(on_keys(lambda seen, b: distances(seen, b) <= reach))


def at_offset(seen: Seen, b: int, offset: int) -> tuple[Tensor, Tensor]:
    """The weight on the key that stands there, and whether one does, for each query."""
    place, keys = seen.own + offset, seen.real.shape[1]
    exists = (place >= 0) & (place < keys)
    place = place.clamp(0, keys - 1)
    rows = torch.arange(len(place))
    return seen.weights[b][:, rows, place], exists & seen.real[b, place]


def offset_profile(seen: Seen) -> Tensor:
    of = [
        mean(
            lambda seen, b, o=offset: at_offset(seen, b, o)[0],
            lambda seen, b, o=offset: at_offset(seen, b, o)[1],
        )
        for offset in range(-16, 17)
    ]
    return torch.stack([one(seen) for one in of], 1)


# ---- keys --------------------------------------------------------------------------------------


def most_received(seen: Seen) -> Tensor:
    rows = seen.real_queries[:, None, :, None]
    viewers = (seen.allowed & rows).sum(2)
    received = (seen.weights * rows).sum(2)
    found: list[list[tuple[float, int, int]]] = [[] for _ in range(seen.heads)]
    for b, h, k in (seen.real[:, None] & (viewers > 0)).nonzero().tolist():
        found[h].append((-received[b, h, k].item(), k - seen.first(b), int(seen.tokens[b, k])))
    return table([[(k, t, -minus) for minus, k, t in sorted(own)[:RANKS]] for own in found], seen)


def one_key(seen: Seen) -> Tensor:
    total, count = seen.zeros(), seen.zeros()
    for b in range(seen.batch):
        received = (seen.weights[b] * seen.real_queries[b, :, None]).sum(1)
        total += received.where(seen.real[b], 0.0).amax(-1)
        count += seen.counted(b).sum(1)
    return total / count


def top_keys(queries: tuple[int, ...]) -> Callable[[Seen], Tensor]:
    def of(seen: Seen) -> Tensor:
        b = int(seen.real_queries.any(1).nonzero()[0])
        places = seen.real_queries[b].nonzero().squeeze(1).tolist()
        tables = []
        for query in queries:
            heads = []
            for row in seen.weights[b, :, places[query]].tolist():
                best = sorted((-w, k) for k, w in enumerate(row) if w > 0)[:RANKS]
                heads.append([(k - seen.first(b), int(seen.tokens[b, k]), -w) for w, k in best])
            tables.append(table(heads, seen))
        return torch.stack(tables, 1)

    return of


def table(rows: list[list[tuple[int, int, float]]], seen: Seen) -> Tensor:
    out = torch.full((len(rows), RANKS, 3), torch.nan, dtype=seen.weights.dtype)
    for h, own in enumerate(rows):
        for rank, fields in enumerate(own):
            out[h, rank] = torch.tensor(fields, dtype=torch.float64).to(out.dtype)
    return out


# ---- tokens ------------------------------------------------------------------------------------


def earlier_same(seen: Seen, b: int) -> Tensor:
    """(queries, keys): the key stands before the query's own, with the same token."""
    same = seen.tokens[b] == seen.tokens[b, seen.own][:, None]
    same &= seen.tokens[b] >= 0
    return same & seen.real[b] & (torch.arange(len(seen.real[b])) < seen.own[:, None])


def after_earlier_same(seen: Seen, b: int) -> Tensor:
    return earlier_same(seen, b).roll(1, dims=1)  # the last key stands before no query


def on_repeats(keys: Number) -> Callable[[Seen], Tensor]:
    return mean(
        on_keys(keys),
        lambda seen, b: earlier_same(seen, b).any(1) & ~seen.specials[b, seen.own],
    )


def copying(seen: Seen) -> Tensor:
    total, count = seen.zeros(), seen.zeros()
    for b in range(seen.batch):
        real = seen.real[b] & (seen.tokens[b] >= 0) & (seen.tokens[b] < len(seen.unembedding))
        kinds = seen.tokens[b, real].unique()
        holds = (seen.tokens[b, :, None] == kinds) & real[:, None]
        weight = seen.weights[b] @ holds.to(seen.weights.dtype)
        logits = written(seen, b) @ seen.unembedding[kinds].T
        some = weight > 0
        average = logits.where(some, 0.0).sum(-1) / some.sum(-1)
        raised = (logits - average[..., None]).clamp(min=0).where(some, 0.0)
        share = (weight * raised).sum(-1) / raised.sum(-1)
        counted = seen.sampled(b) & (some.sum(-1) > 1) & (raised.sum(-1) > 0)
        total += share.where(counted, 0.0).sum(1)
        count += counted.sum(1)
    return total / count


# ---- outputs -----------------------------------------------------------------------------------


def written(seen: Seen, b: int) -> Tensor:
    """(heads, queries, embed_dim)."""
    return torch.einsum("hid,hde->hie", seen.outputs[b], seen.out_proj)


def contribution(seen: Seen, b: int) -> Tensor:
    return written(seen, b).norm(dim=-1)


def value_weighted(seen: Seen, b: int) -> Tensor:
    values = stages.repeat_kv_heads(seen.values, heads=seen.heads)[b]
    norms = torch.einsum("hkd,hde->hke", values, seen.out_proj).norm(dim=2)
    return (seen.weights[b] * norms[:, None]).sum(-1)


def effective_rank(seen: Seen) -> Tensor:
    ranks = []
    for h in range(seen.heads):
        z = torch.cat([seen.outputs[b, h, seen.counted(b)[h]] for b in range(seen.batch)])
        sigma = torch.linalg.svdvals(z - z.mean(0))
        ranks.append(torch.special.entr(sigma / sigma.sum()).sum().exp())
    return torch.stack(ranks)


def output_cosine(seen: Seen) -> Tensor:
    total, count = seen.zeros(seen.heads), seen.zeros(seen.heads)
    for b in range(seen.batch):
        c = written(seen, b)[:, seen.real_queries[b]]
        norm = c.norm(dim=-1)
        both = (norm[:, None] > 0) & (norm > 0)
        cosine = (c[:, None] * c).sum(-1) / (norm[:, None] * norm).where(both, 1.0)
        total, count = total + cosine.where(both, 0.0).sum(-1), count + both.sum(-1)
    return total / count


def cka(seen: Seen) -> Tensor:
    total = seen.zeros(seen.heads)
    for b in range(seen.batch):
        rows = seen.sampled(b).all(0)
        n = int(rows.sum())
        if n >= 4:
            kernels = [u_centred(own @ own.T) for own in seen.outputs[b][:, rows]]
            products = [[(x * y).sum() / (n * (n - 3)) for y in kernels] for x in kernels]
            total += torch.stack([torch.stack(row) for row in products])
    own = total.diagonal().sqrt()
    return total / torch.outer(own, own)


def u_centred(kernel: Tensor) -> Tensor:
    """Szekely and Rizzo 2014: the matrix whose inner products are the unbiased HSIC."""
    n = len(kernel)
    k = kernel - torch.diag(kernel.diagonal())
    centred = k - k.sum(0) / (n - 2) - k.sum(1)[:, None] / (n - 2) + k.sum() / ((n - 1) * (n - 2))
    return centred - torch.diag(centred.diagonal())


def total_variation(seen: Seen) -> Tensor:
    total, count = seen.zeros(seen.heads), seen.zeros(seen.heads)
    for b in range(seen.batch):
        p, rows = seen.outcomes(b), seen.sampled(b)
        both = rows[:, None] & rows
        total += (1 - (p[:, None] - p).abs().sum(-1) / 2).where(both, 0.0).sum(-1)
        count += both.sum(-1)
    return total / count


def head_distance(seen: Seen) -> Tensor:
    total, count = seen.zeros(seen.heads), seen.zeros(seen.heads)
    for b in range(seen.batch):
        p, rows = seen.outcomes(b), seen.counted(b)
        both = rows[:, None] & rows
        total += ((p[:, None] - p).abs().sum(-1) / 2).where(both, 0.0).sum(-1)
        count += both.sum(-1)
    return total / count


def block_map(cells: int = 0) -> Callable[[Seen], Tensor]:
    """The map with at most so many blocks on each side; 0 for the usual number."""

    def of(seen: Seen) -> Tensor:
        key_places = [places(real) for real in seen.real]
        query_places = [places(real) for real in seen.real_queries]
        if seen.own_key is not None:
            own = seen.own.tolist()
            query_places = [[each[key] for key in own] for each in key_places]
            for each, real in zip(query_places, seen.real_queries.tolist(), strict=True):
                each[:] = [at if is_real else -1 for at, is_real in zip(each, real, strict=True)]
        (rows, down), (columns, across) = (
            blocks(1 + max(map(max, side)), cells) for side in (query_places, key_places)
        )
        total, count = seen.zeros(rows, columns), seen.zeros(rows, 1)
        for b in range(seen.batch):
            to_query = one_hot(query_places[b], rows, down).to(total.dtype)
            to_key = one_hot(key_places[b], columns, across).to(total.dtype)
            to_query = seen.counted(b)[..., None] * to_query
            total += torch.einsum("hik,hia,kb->hab", seen.weights[b], to_query, to_key)
            count += to_query.sum(1)[..., None]
        return total / count

    return of


def places(real: Tensor) -> list[int]:
    """The number of each place among those that are real; -1 for padding."""
    numbers = iter(range(len(real)))
    return [next(numbers) if is_real else -1 for is_real in real.tolist()]


def blocks(tokens: int, cells: int) -> tuple[int, int]:
    """The number of blocks of a text, and the tokens of each."""
    size, most = 1, cells or (512 if tokens <= 512 else 160)
    while math.ceil(tokens / size) > most:
        size *= 2
    return math.ceil(tokens / size), size


def one_hot(place: list[int], blocks: int, size: int) -> Tensor:
    """(length, blocks); nothing for -1."""
    return torch.tensor(place)[:, None].div(size, rounding_mode="floor") == torch.arange(blocks)


REFERENCE: dict[str, Callable[[Seen], Tensor]] = {
    "entropy": mean(entropy_of),
    "relative_entropy": mean(relative_entropy, lambda s, b: choices(s, b) > 1),
    "maximum": mean(lambda s, b: s.weights[b].amax(-1)),
    "effective_keys": mean(lambda s, b: entropy_of(s, b).exp()),
    "participation": mean(participation),
    "logsumexp": mean(lambda s, b: s.logsumexp(b)),
    "score_range": mean(score_range, lambda s, b: s.allowed[b].sum(-1) > 1),
    "first_token": mean(lambda s, b: s.weights[b, :, :, s.first(b)]),
    "sink": mean(lambda s, b: s.sink_share(b)),
    "one_key": one_key,
    "most_received": most_received,
    "previous_token": mean(
        lambda s, b: at_offset(s, b, -1)[0], lambda s, b: at_offset(s, b, -1)[1]
    ),
    "offset_profile": offset_profile,
    "distance": mean(on_keys(distances)),
    "within_16": within(16),
    "within_64": within(64),
    "within_256": within(256),
    "duplicate_token": on_repeats(earlier_same),
    "induction": on_repeats(after_earlier_same),
    "copying": copying,
    "separator": mean(on_keys(lambda s, b: s.separators[b])),
    "special": mean(on_keys(lambda s, b: s.specials[b])),
    "contribution_norm": mean(contribution),
    "relative_contribution": mean(
        lambda s, b: contribution(s, b) / s.residual[b].norm(dim=-1),
        lambda s, b: s.residual[b].norm(dim=-1) > 0,
    ),
    "value_weighted": mean(value_weighted),
    "effective_rank": effective_rank,
    "output_cosine": output_cosine,
    "cka": cka,
    "total_variation": total_variation,
    "head_distance": head_distance,
    "top_keys": top_keys((-1,)),
    "map": block_map(),
}
