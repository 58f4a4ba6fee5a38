"""Stages of an attention on a tape, in the axes of an attention that is known as data.

A port may have any order of axes, fused projections, heads one after the other, or channels of q
and k in another order. A tensor is a stage if its numbers are those that the known attention has
there, computed from the stages before it. Where no tensor has them, the tensor in the stage's place
is taken, and the stage parts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

import torch
from torch import Tensor

from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.rounding import default_tolerance
from headwise.scanning.sites import Site
from headwise.scanning.tape import Node
from headwise.scanning.torch_calls import HIDDEN

TOLERANCE = default_tolerance(torch.float32)  # of a model that rotates and normalises in float32


def arrange(x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield the ways to read a tensor as one with axes of these sizes, in any order, joined or not.

    The natural order comes first.
    """
    if x.numel() != math.prod(sizes):
        return
    wide = [axis for axis, size in enumerate(sizes) if size > 1]
    joined = {*accumulate((n for n in x.shape if n > 1), lambda a, b: a * b)}
    for order in permutations(wide):
        ends = {*accumulate((sizes[axis] for axis in order), lambda a, b: a * b)}
        if joined <= ends:
            rows = x.reshape([sizes[axis] for axis in order])
            back = sorted(range(len(order)), key=order.__getitem__)
            yield rows.permute(back).reshape(*sizes)


def find_nearest(candidates: Iterable[Tensor], expected: Tensor) -> tuple[float, Tensor | None]:
    """Return the relative difference of the candidate that is nearest, and the candidate."""
    best: tuple[float, Tensor | None] = (math.inf, None)
    size = float(expected.norm()) or 1.0
    for x in candidates:
        gap = float((x.double() - expected).norm()) / size
        gap = gap if math.isfinite(gap) else torch.finfo(torch.float64).max
        if gap < best[0]:
            best = gap, x.double()
    return best


def read_tokens(nodes: Iterable[Node], like: Tensor) -> Tensor | None:
    """Return what enters projections as (batch, length, width); None where nothing has its size."""
    for node in nodes:
        ways = [x.double() for x in arrange(node.value, like.shape)]
        if ways:
            natural = find_nearest(ways[:1], like.double())
            other = find_nearest(ways[1:], like.double())
            return other[1] if other[0] < natural[0] / 2 else natural[1]
    return None


def read_inputs(site: Site, known: RecordedCall) -> RecordedCall | None:
    """Return a call with the inputs of an attention on a tape; None if they have other sizes.

    The known call has the mask, and the shapes of its inputs.
    """
    x = read_tokens(site.sources["q"], known.inputs.x)
    source = known.inputs.source
    if source is not None:
        source = read_tokens(site.sources["k"], source)
    if x is None or (source is None and known.inputs.source is not None):
        return None
    return RecordedCall(replace(known.inputs, x=x, source=source), {}, torch.float32)


@dataclass(eq=False)
class Reading:
    """Reading of one attention of a tape beside a known one.

    Attributes:
        site: the attention on the tape.
        model: the known attention.
        call: with the input that the site has, and the mask of the known attention.
    """

    site: Site
    model: AttentionModel
    call: RecordedCall

    def __post_init__(self) -> None:
        self.batch, self.queries = self.call.inputs.x.shape[:2]
        self.keys = self.call.inputs.key_source.shape[1]
        axes = ("heads", "head_dim", "kv_heads", "value_dim")
        heads, head_dim, kv_heads, value_dim = (self.model.sizes[axis] for axis in axes)
        weights = self.site.products[0].weights.value.numel() * len(self.site.products)
        actual = weights // (self.batch * self.queries * self.keys)
        if actual and actual != heads and (heads * head_dim) % actual == 0:
            head_dim, value_dim = heads * head_dim // actual, kv_heads * value_dim // actual
            heads = kv_heads = actual
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.value_dim = value_dim
        self.order: Tensor | None = None  # (heads, head_dim), of the channels of q and k

    def read(self) -> RecordedCall:
        """Return the call with its stages, up to the last that is right."""
        expected = self.model.predict_all_stages(self.call)
        output = self._read_rows(self.site.later(), expected["output"], ())
        if self._is_right("output", output):
            return self._with({"output": output})
        late = self._read_late(expected)
        if self._is_right("head outputs", late["head outputs"]):
            return self._with(late)
        self._read_role("v", expected)
        weights = self.read_weights(expected["weights"])
        if not self._is_right("weights", weights):
            self._read_queries_and_keys()
            self._read_scores()
            # The axes of a wrong stage are those in which the next one follows from it.
            weights = self.read_weights(self.model.predict_stage("weights", self.call))
        self._with({"weights": weights})
        forced = {"head outputs": self.model.predict_stage("head outputs", self.call)}
        return self._with(self._read_late({**expected, **forced}))

    def _read_late(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return what enters the output projection, and what leaves it."""
        ends = self.site.outputs()
        ends = [x for x in ends if x.value.dim() > 2] or ends  # with tokens and batch apart
        output = self._read_rows(reversed(ends), expected["output"], ends[-1:])
        heads = self._read_head_outputs(expected["head outputs"])
        return {"head outputs": heads, "output": output}

    def _with(self, stages: Mapping[str, Tensor | None]) -> RecordedCall:
        known = {name: x for name, x in stages.items() if x is not None}
        self.call = self.call.with_stages({**self.call.stages, **known})
        return self.call

    def _is_right(self, stage: str, x: Tensor | None) -> bool:
        """True if a stage is what the known attention computes of the input alone."""
        if x is None:
            return False
        call = self.call.with_stages({stage: x})
        return not measure_gaps(self.model, [call], [stage]).cells_beyond_rounding

    def _read_rows(
        self, nodes: Iterable[Node], like: Tensor, last: Iterable[Node]
    ) -> Tensor | None:
        """Return the rows that are right; those that are nearest in ``last`` where none are."""
        ways = ((x for n in part for x in arrange(n.value, like.shape)) for part in (nodes, last))
        (gap, right), (_, others) = (find_nearest(way, like) for way in ways)
        return right if gap <= TOLERANCE else others

    def _read_head_outputs(self, expected: Tensor) -> Tensor | None:
        if self.site.projection is None:
            return None
        sizes = self.batch, self.kv_heads, self._group, self.queries, self.value_dim
        x = self.site.projection.projected.value
        return _nearest_or_first((each.flatten(1, 2) for each in arrange(x, sizes)), expected)

    def read_weights(self, expected: Tensor | None = None) -> Tensor | None:
        """Return the weights, (batch, heads, queries, keys); None if they have other axes."""
        ways = self._of_heads([each.weights for each in self.site.products])
        return next(ways, None) if expected is None else _nearest_or_first(ways, expected)

    # ---- projections and rotation ----------------------------------------------------------------

    def _sizes(self, role: str, *, is_repeated: bool = False) -> tuple[int, ...]:
        width = self.value_dim if role == "v" else self.head_dim
        length = self.queries if role == "q" else self.keys
        group = self.heads // self.kv_heads if role == "q" or is_repeated else 1
        return self.batch, self.kv_heads, group, length, width

    def _arrange(self, nodes: Iterable[Node], role: str) -> Iterator[Tensor]:
        """Yield the tensors of a role as (batch, heads, length, channels).

        What is rounded to half precision for the product alone is a part of the product.
        """
        for node in nodes:
            if node.is_half:
                continue
            for x in arrange(node.value, self._sizes(role)):
                yield x.flatten(1, 2)
            if role != "q" and self.heads > self.kv_heads:
                for x in arrange(node.value, self._sizes(role, is_repeated=True)):
                    if torch.equal(x, x[:, :, :1].expand_as(x)):
                        yield x[:, :, 0]

    def _read_role(self, role: str, expected: Mapping[str, Tensor]) -> None:
        """Read a projection: from the product itself, if nothing changes its numbers before."""
        projected = self.site.projected(role)
        ways = [*self._arrange(self.site.operands[role], role)]
        is_used_as_it_is = bool(ways) and {*self.site.operands[role]} <= {*projected}
        candidates = ways if is_used_as_it_is else self._arrange(self.site.chains[role], role)
        gap, nearest = self._find(candidates, expected[role], role)
        if gap > TOLERANCE:
            nearest = self._last(self.site.unscaled(role) if is_used_as_it_is else projected, role)
        self._with({role: nearest})
        if is_used_as_it_is and nearest is not None and role != "v":
            self._with({f"{role} after rotary": nearest})

    def _find(
        self, candidates: Iterable[Tensor], expected: Tensor, role: str
    ) -> tuple[float, Tensor | None]:
        """Return the nearest candidate, times the factor that makes it as large as expected.

        Channels of q and k may be in another order, the same for both.
        """
        if role == "v":
            return find_nearest((x for x in candidates if x.shape == expected.shape), expected)
        size = float(expected.norm())
        scaled = []
        for x in candidates:
            if x.shape == expected.shape and (norm := float(x.double().norm())):
                scaled.append(x.double() * (size / norm))
        if self.order is not None:
            best = find_nearest(map(self._reorder, scaled), expected)
            if best[0] <= TOLERANCE:
                return best
        best = find_nearest(scaled, expected)
        if best[0] <= TOLERANCE or role == "k" or self.order is not None:
            return best
        for x in scaled:
            order = _match_channels(x, expected)
            if order is not None:
                self.order = order
                return find_nearest([self._reorder(x)], expected)
        return best

    def _reorder(self, x: Tensor) -> Tensor:
        """Return q or k with its channels in the known order."""
        assert self.order is not None
        order = self.order if len(self.order) == x.shape[1] else self.order[:: self._group]
        return x.gather(-1, order[None, :, None].expand(len(x), -1, x.shape[2], -1))

    @property
    def _group(self) -> int:
        return self.heads // self.kv_heads

    def _read_queries_and_keys(self) -> None:
        for role in "qk":
            self._read_role(role, {role: self.model.predict_stage(role, self.call)})
            if f"{role} after rotary" in self.call.stages:
                continue
            norm = self.model.settings.norm
            if norm is not None and norm.place == "before":
                self._read_norm(role)
            self._read_stage(f"{role} after rotary", role)

    def _read_stage(self, stage: str, role: str) -> None:
        """Read what enters the scores."""
        if role not in self.call.stages:
            return
        expected = self.model.predict_stage(stage, self.call)
        nodes = self.site.operands[role]
        nodes = nodes if any(True for _ in self._arrange(nodes, role)) else self.site.chains[role]
        gap, nearest = self._find(self._arrange(nodes, role), expected, role)
        if gap > TOLERANCE:
            nearest = self._last([*nodes, *self.site.unscaled(role)], role)
        self._with({stage: nearest})

    def _last(self, nodes: Sequence[Node], role: str) -> Tensor | None:
        """Return the tensor that is nearest to the product."""
        for node in reversed(nodes):
            for x in self._arrange([node], role):
                is_moved = self.order is not None and role != "v"
                return self._reorder(x.double()) if is_moved else x.double()
        return None

    def _read_norm(self, role: str) -> None:
        """Read q or k after a norm: what is right, or else what is the operand after a rotation."""
        stage, after = f"{role} after norm", f"{role} after rotary"
        expected = self.model.predict_stage(stage, self.call)
        ways = [x for x in self._arrange(self.site.chains[role], role) if x.shape == expected.shape]
        gap, nearest = self._find(ways, expected, role)
        if gap > TOLERANCE and ways:
            nearest = last = self._last(self.site.chains[role], role)
            assert last is not None
            for x in ways:
                before = x.double() if self.order is None else self._reorder(x.double())
                trial = self.call.with_stages({**self.call.stages, stage: before})
                rotated = self.model.predict_stage(after, trial)
                if find_nearest([rotated], last)[0] <= TOLERANCE:
                    nearest = before
                    break
        self._with({stage: nearest})

    # ---- scores and weights ----------------------------------------------------------------------

    def _of_heads(self, nodes: Sequence[Node]) -> Iterator[Tensor]:
        """Yield the ways to read scores or weights, of one product or of one for each head."""
        if len(nodes) == 1:
            sizes = self.batch, self.kv_heads, self._group, self.queries, self.keys
            for x in arrange(nodes[0].value, sizes):
                yield x.flatten(1, 2)
        elif len(nodes) == self.heads:
            ways = [[*arrange(n.value, (self.batch, self.queries, self.keys))] for n in nodes]
            for heads in zip(*ways, strict=False):
                yield torch.stack(heads, 1)

    def _read_scores(self) -> None:
        """Read scores, but for a number that is added to all scores of a query."""
        expected = self.model.predict_stage("scores", self.call)
        chains = self.site.scores()
        steps = zip(*chains, strict=False)  # one tensor of each pair of products
        ways = [x.double() for nodes in steps for x in self._of_heads(nodes)]
        ways = [_hide(x, expected) for x in ways if x.shape == expected.shape]
        seen = expected.isfinite()
        target = expected.masked_fill(~seen, 0.0)
        for x in ways:
            if not torch.equal(x.isfinite(), seen):
                continue
            shift = (torch.logsumexp(expected, -1) - torch.logsumexp(x, -1))[..., None]
            moved = (x + shift.nan_to_num(0.0)).masked_fill(~seen, 0.0)
            if find_nearest([moved], target)[0] <= TOLERANCE:
                self._with({"scores": moved.masked_fill(~seen, -math.inf)})
                return
        entering = [_hide(x.double(), expected) for x in self._of_heads(self.site.softmaxes())]
        near = (x for x in entering if _is_multiple_where_seen(x, expected))
        self._with({"scores": next(near, next(iter(entering), None))})


def _nearest_or_first(ways: Iterable[Tensor], expected: Tensor) -> Tensor | None:
    """Return the way of reading that is right; the first, in the usual order, where none is."""
    ways = [x.double() for x in ways]
    same = [x for x in ways if x.shape == expected.shape]
    if not same:
        return next(iter(ways), None)
    finite = expected.nan_to_num(neginf=0.0)
    gaps = [float((x.nan_to_num(neginf=0.0) - finite).norm()) for x in same]
    is_right = min(gaps) <= TOLERANCE * float(finite.norm())
    return same[gaps.index(min(gaps)) if is_right else 0]


def _is_multiple_where_seen(x: Tensor, expected: Tensor) -> bool:
    """True if scores are expected ones times a number, where both see a key."""
    if x.shape != expected.shape:
        return False
    seen = x.isfinite() & expected.isfinite()
    mine, theirs = x[seen], expected[seen]
    factor = (mine @ theirs) / (theirs @ theirs)
    return bool((mine - factor * theirs).norm() <= TOLERANCE * mine.norm())


def _hide(scores: Tensor, expected: Tensor) -> Tensor:
    """Return scores with -inf where a large negative number hides a key."""
    if scores.shape != expected.shape:
        return scores.masked_fill(scores <= HIDDEN, -math.inf)
    far = scores.softmax(-1) == 0
    return scores.masked_fill(far & (~expected.isfinite() | (scores <= HIDDEN)), -math.inf)


def _match_channels(x: Tensor, expected: Tensor) -> Tensor | None:
    """Return the channel of ``x`` that is each expected one, by head; None if one is missing."""
    mine, theirs = (each.permute(1, 3, 0, 2).flatten(2) for each in (x, expected))
    gaps = torch.cdist(theirs, mine)  # (heads, expected channels, channels)
    least, order = gaps.min(-1)
    size = theirs.norm(dim=-1).amax(-1, keepdim=True)
    is_permutation = bool((order.sort(-1).values == torch.arange(order.shape[1])).all())
    return order if is_permutation and bool((least <= TOLERANCE * size).all()) else None
