"""Names of faults of weights that outputs show: moves that are tried, and roles that are read.

One token says whether values and the output projection are right, and two whether queries and keys
are. Of the part that is wrong, every named move is tried on few outputs, and each role is read as a
matrix, with all others right, and given to the search of moves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.outputs import reading
from headwise.diagnosis.outputs.reading import Read
from headwise.diagnosis.outputs.runs import Runs, agree_on_few, agrees, predict_each
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.errors import OptionError
from headwise.function.records import STAGES
from headwise.function.spec import ABSENT
from headwise.function.weights import KINDS, State, bias_of, kinds_of
from headwise.identify.catalogue import ADAPTERS_MERGED, BIAS_MISSING, ROWS_ZERO, SIGN, Cause
from headwise.identify.comparison import format_noun_with_numbers
from headwise.identify.moves import families, find
from headwise.identify.moves import search as moves_search
from headwise.identify.moves.maps import (
    BIASES,
    BOTH,
    TENSORS,
    WEIGHTS,
    MapName,
    MatrixMap,
    RowMap,
    RowSizes,
    count_columns,
    is_of_projections,
    view_kind,
)
from headwise.identify.moves.move import (
    ROUNDED,
    Dropped,
    Edited,
    Limited,
    Move,
    Taken,
    name_rounding,
    name_zeros,
)

OTHERS = KINDS[1:-1]  # without the output bias, which is read
UNREAD = {"g", *(tensor for kind in OTHERS for tensor in kind.values())}
SCORED = {"q", "k", *UNREAD} - {"g"}
UNREAD_TENSORS = {TENSORS.get(role, role) for role in UNREAD}
OF_VALUES = {"g"} | (UNREAD & {*STAGES["v"].tensors, *STAGES["head outputs"].tensors})
FEWEST = 16  # sequences of two tokens
FLOOR_FINE, FLOOR = 4e-6, 4e-5  # of what is read in float64 and in float32
NOISE = 10  # times the standard deviation
MOST_JOINT = 3  # moves of several roles that are tried in the heads of one
HALF = 0.5  # of the heads
LOW = 4  # a rank is low if so many times it fits into the matrix

Moves = tuple[Move, ...]


def find_output_moves(model: AttentionModel, runs: Runs, *, crosses: bool) -> tuple[Moves, ...]:
    """Return sequences of moves, each of which explains a part of the outputs or all of it."""
    if model.settings.compressed:  # whose values are no products of tokens
        return ()
    try:
        sequences = tuple(_Search(model, runs, crosses).yield_moves())
        return tuple(moves for moves in sequences if not any(map(_repeats_head, moves)))
    except OptionError:  # a function that fails on one token, or on many sequences
        return ()


def list_unread_moves(model: AttentionModel) -> list[Move]:
    """Return the named moves of tensors that are not read: of the gate, the norms and the sink."""
    moves = _list_moves(model, UNREAD) if UNREAD_TENSORS & model.weights.keys() else ()
    return [move for move in moves if UNREAD & {*move.roles}]


def _describe_rotation(model: AttentionModel) -> dict[str, Any]:
    rotary = model.settings.rotation
    is_interleaved = rotary is not None and rotary.pairing == "interleaved"
    width = None if rotary is None else rotary.width
    return {"rotary_width": width, "is_interleaved": is_interleaved}


def _list_moves(model: AttentionModel, roles: set[str]) -> Iterator[Move]:
    """Yield the named moves of some projections, or of tensors of another kind."""
    rotary = _describe_rotation(model)
    for kind in kinds_of(model.weights)[:-1]:  # without the output bias, which is read
        if is_of_projections(kind):
            moves = _MoveList(view_kind(model.weights, kind), rotary).of_roles(roles, {"g"})
            yield from (move.of_kind(kind) for move in moves)
        elif roles & {*kind.values()} and (rows := view_kind(model.weights, kind)):
            moves = _MoveList(rows, rotary).of_roles({*kind}, {*kind})
            yield from (move.of_kind(kind) for move in moves)


class _MoveList:
    """Named moves of weights."""

    def __init__(self, weights: State, rotary: dict[str, Any]) -> None:
        self.weights, self.rotary, self.sizes = weights, rotary, RowSizes.of(weights)

    def of_roles(self, roles: set[str], unread: set[str]) -> Iterator[Move]:
        """Yield the moves of some roles, with changes of all numbers of those that are unread."""
        biased = {r for r in self.sizes.roles if r != "o" and f"b{r}" in self.weights}
        for step in self.list_steps(roles):
            moved = {*step.names[0].roles}
            yield Move.of_step(step)
            if isinstance(step, RowMap) and moved & biased:
                yield Move.of_step(step, WEIGHTS)
                if moved & biased & roles:
                    yield Move.of_step(step, BIASES)
        for count in (2, 3):  # one alone is read
            for together in combinations([role for role in "qkv" if role in biased], count):
                if roles & {*together}:
                    name = MapName(BIAS_MISSING, "", together)
                    yield Move(name, Dropped(together, parts=BIASES))
        for role in sorted(roles & {*self.sizes.roles}):
            for head in range(self.sizes.count_heads(role)):
                yield _zero_heads(ROWS_ZERO, role, (head,), WEIGHTS if role == "o" else BOTH)
                if role in biased:
                    yield _zero_heads(BIAS_MISSING, role, (head,))
            yield from _list_edits(role, role in biased, is_read=role not in unread)

    def list_steps(self, roles: set[str]) -> list[RowMap | MatrixMap]:
        """Return the maps of some projections."""
        sizes = replace(self.sizes, **self.rotary)
        maps = families.make_row_map_catalogue(sizes, count_columns(self.weights)).maps
        matrix_maps = moves_search.list_matrix_maps(self.weights, self.sizes)
        cut = [step.roles[0] for step in matrix_maps if not step.is_square and step.is_reversed]
        for together in map(tuple, ("qkv", "qk", "kv", "qkvg")):
            if {*together} <= {*cut}:
                matrix_maps += [MatrixMap(together, False, reverse) for reverse in (False, True)]
        steps: list[RowMap | MatrixMap] = [*maps, *matrix_maps]
        return [step for step in steps if roles & {*step.names[0].roles}]


class _Search(_MoveList):
    def __init__(self, model: AttentionModel, runs: Runs, crosses: bool) -> None:
        super().__init__(model.weights, _describe_rotation(model))
        self.model, self.runs, self.crosses = model, runs, crosses

    def yield_moves(self) -> Iterator[Moves]:
        single = self.runs.single_call(self.model, crosses=self.crosses)
        pair = self.runs.random_call(self.model, FEWEST, 2, crosses=self.crosses)
        has_sink, model = "sink" in self.model.weights, self.model
        if not agrees(model, single, self.runs.tolerance):
            # No setting of the scores changes them, but where a sink takes a part of the weight.
            settings = model.settings if has_sink else None
            key = ("values", *model.weights.values(), *model.replaced.values(), settings)
            yield from self.runs.remember(key, lambda: [*self._yield_value_moves(single, pair)])
            if has_sink:
                yield from self._yield_score_moves(pair)
        elif not agrees(model, pair, self.runs.tolerance):
            yield from self._yield_score_moves(pair)

    def _yield_value_moves(self, single: RecordedCall, pair: RecordedCall) -> Iterator[Moves]:
        yield from self._try_moves({"v", "o", *OF_VALUES}, single, pair)
        yield from self._name_reads(self._read_values(single))

    def _yield_score_moves(self, pair: RecordedCall) -> Iterator[Moves]:
        fitting = [*self._try_moves({"q", "k", *UNREAD} - OF_VALUES, pair, pair)]
        yield from fitting
        if not fitting:
            yield from ((move,) for move in self._list_near_moves(pair))
        yield from self._name_reads(self._read_scores())

    # ---- moves that are tried --------------------------------------------------------------------

    def _try_moves(
        self, roles: set[str], call: RecordedCall, pair: RecordedCall
    ) -> Iterator[tuple[Move]]:
        """Yield the moves that explain a call; if any explain two tokens too, those alone."""
        changes = self._changes_of(roles)
        known = self._agreements(changes, call)
        fitting = [
            (move, replace(self.model, weights=weights))
            for move, key, weights in changes
            if known[key]
        ]
        whole = [move for move, changed in fitting if agrees(changed, pair, self.runs.tolerance)]
        alone = [move for move, _ in fitting if {*move.roles} <= roles]
        # Where another fault is beside it, moves of more roles are as likely as those of these.
        for move in whole or dict.fromkeys([*alone, *(move for move, _ in fitting)]):
            yield (move,)

    def _changes_of(self, roles: set[str]) -> list[tuple[Move, object, State]]:
        """Return the named moves of some roles, a key of what each changes in them, and weights."""

        def make() -> list[tuple[Move, object, State]]:
            tensors = [TENSORS.get(role, role) for role in sorted(roles)]
            names = [name for tensor in tensors for name in (tensor, bias_of(tensor))]
            made = list[tuple[Move, object, State]]()
            for move in _list_moves(self.model, roles):
                weights = move.apply(self.model.weights)
                if any(weights.get(n) is not self.model.weights.get(n) for n in names):
                    made.append((move, _key_of_change(move, roles, self), weights))
            return made

        key = ("moves", *sorted(roles), *self.rotary.values(), *self.model.weights.values())
        changes: list[tuple[Move, object, State]] = self.runs.remember(key, make)
        return changes

    def _agreements(
        self, changes: Sequence[tuple[Move, object, State]], call: RecordedCall
    ) -> dict[object, bool]:
        models: dict[object, AttentionModel] = {}
        for _, key, weights in changes:
            models.setdefault(key, replace(self.model, weights=weights))
        known = dict.fromkeys(models, True)
        joint = [key for key, model in models.items() if self._projects_alone(model)]
        few = agree_on_few(self.model, [models[k] for k in joint], call, self.runs.tolerance)
        known.update(zip(joint, few, strict=True))
        for key in (key for key, is_near in known.items() if is_near):
            watch.look()
            known[key] = agrees(models[key], call, self.runs.tolerance)
        return known

    def _projects_alone(self, model: AttentionModel) -> bool:
        right = self.model.weights
        projections = [TENSORS[role] for role in "qkv"]
        others = right.keys() - {*projections, *map(bias_of, projections)}
        return all(model.weights.get(name) is right[name] for name in others)

    def _list_near_moves(self, pair: RecordedCall) -> Iterator[Move]:
        """Yield moves of queries and keys beside which another fault of the scores may be.

        After them the scores of two tokens lack one factor, or are right in most heads.
        """
        model, settings = self.model, self.model.settings
        has_bias = settings.score_bias is not ABSENT or "distances" in model.weights
        if model.replaced or settings.cap is not None or self.runs.is_narrow:
            return
        weights = reading.read_two_weights(model, pair, 10 * self.runs.tolerance)
        if weights is None or not bool((weights > 0).all()):
            return
        seen, logits = weights.prod(2), weights.log()
        right = seen * (logits[..., 0] - logits[..., 1])
        changes = {key: (move, state) for move, key, state in self._changes_of(SCORED)}
        models = [model, *(replace(model, weights=state) for _, state in changes.values())]
        usual, *others = predict_each(model, models, "scores", pair)
        usual, *others = (seen * (x[..., 0] - x[..., 1]) for x in (usual, *others))
        is_scaled = not has_bias and not self._is_multiple(usual, right)
        is_right = self._is_right_in_most_heads(usual, right)
        for (move, _), predicted in zip(changes.values(), others, strict=True):
            is_near = is_scaled and self._is_multiple(predicted, right)
            if is_near or (not is_right and self._is_right_in_most_heads(predicted, right)):
                yield move

    def _is_multiple(self, x: Tensor, right: Tensor) -> bool:
        factor = (x * right).sum() / x.square().sum().clamp_min(1e-300)
        return bool((factor * x - right).norm() <= 100 * self.runs.tolerance * right.norm())

    def _is_right_in_most_heads(self, x: Tensor, right: Tensor) -> bool:
        """True if (sequences, heads) agree in more than half of the heads to rounding."""
        left, size = (x - right).norm(dim=0), right.norm(dim=0)
        return float((left <= 100 * self.runs.tolerance * size).double().mean()) > HALF

    # ---- roles that are read ---------------------------------------------------------------------

    def _read_values(self, single: RecordedCall) -> Iterator[Read | None]:
        model, tolerance = self.model, self.runs.tolerance
        if model.replaced or self.runs.is_narrow:
            return
        read = reading.read_values(model, single, tolerance)
        projection = reading.read_output_projection(model, single, tolerance)
        yield from (read, projection)
        if count := reading.count_sequences(model):  # with less noise, where the scores are right
            few = self.runs.random_call(model, count, 3, crosses=self.crosses)
            if read is None or not self.runs.is_fine:
                yield reading.read_values_by_head(model, few, tolerance)
            if projection is None or not self.runs.is_fine:
                yield reading.read_output_projection(model, few, tolerance)

    def _read_scores(self) -> Iterator[Read | None]:
        if self.model.replaced or self.runs.is_narrow:
            return
        for read in (reading.read_queries, reading.read_keys):
            yield read(self.model, self.runs, self.runs.tolerance, crosses=self.crosses)

    def _name_reads(self, reads: Iterator[Read | None]) -> Iterator[Moves]:
        for read in reads:
            watch.look()
            if read is not None:
                yield from self._name_read(read)

    def _name_read(self, read: Read) -> Iterator[Moves]:
        weights = self.model.weights
        tolerance = max(FLOOR_FINE if self.runs.is_fine else FLOOR, NOISE * read.noise)
        snapped = {n: _snap(x, weights[n], tolerance) for n, x in read.weights.items()}
        read, state = replace(read, weights=snapped), {**weights, **snapped}
        report = find.find_state_moves(state, weights, tolerance=tolerance, **self.rotary)
        if read.role in report.unexplained:
            self.runs.unnamed.append((self.model, read))
        else:
            yield from (moves for moves in (report.moves, *report.others) if moves)
        # Numbers that look initialised may be a change of right ones that look so too.
        if not report.unexplained and not any(m.cause.is_statistical for m in report.moves):
            return
        if (move := self._find_low_rank_change(read, tolerance)) is not None:
            yield (move,)
        for move in self._limit_moves_to_heads(read, tolerance):
            yield (move,)

    def _limit_moves_to_heads(self, read: Read, tolerance: float) -> Iterator[Move]:
        role, parted = read.role, {}
        for part in BOTH:
            name = f"{part[0]}{role}"
            if name != "bo" and name in read.weights:
                ours, right = read.weights[name], self.model.weights[name]
                if heads := _parted_heads(ours, right, tolerance):
                    parted[part] = heads
        heads = next(iter(parted.values()), ())
        if not heads or len(heads) == self.sizes.count_heads(role):
            return
        parts = tuple(parted)
        if parts == BIASES and not bool(read.weights[f"b{role}"][list(heads)].any()):
            yield _zero_heads(BIAS_MISSING, role, heads)
            return
        steps = self.list_steps({role})
        fitting = [step for step in steps if self._makes_heads(step, read, parts, heads, tolerance)]
        alone = [_limit(Move.of_step(step), (role,), heads, parts) for step in fitting]
        if alone:
            others = (name for move in alone[1:] for name in (move.name, *move.equals))
            yield replace(alone[0], equals=(*alone[0].equals, *others))
        for step in fitting[:MOST_JOINT]:
            roles = step.names[0].roles
            if roles != (role,) and len({self.sizes.count_heads(each) for each in roles}) == 1:
                for joint in dict.fromkeys((parts, BOTH)):
                    yield _limit(Move.of_step(step), roles, heads, joint)

    def _makes_heads(
        self,
        step: RowMap | MatrixMap,
        read: Read,
        parts: tuple[str, ...],
        heads: Sequence[int],
        tolerance: float,
    ) -> bool:
        made = Move.of_step(step, parts).change.apply(self.model.weights)
        names = [f"{part[0]}{read.role}" for part in parts]
        parted = (_parted_heads(made[name], read.weights[name], tolerance) for name in names)
        return all({*heads}.isdisjoint(each) for each in parted)

    def _find_low_rank_change(self, read: Read, tolerance: float) -> Move | None:
        role = read.role
        right = self.model.weights[f"w{role}"]
        change = read.weights[f"w{role}"] - right
        heads = _parted_heads(read.weights[f"w{role}"], right, tolerance)
        if not heads:
            return None
        parted = change[list(heads)].flatten(0, 1)
        u, sizes, v = torch.linalg.svd(parted, full_matrices=False)
        noise = tolerance * float(right.square().mean().sqrt()) * max(parted.shape) ** 0.5
        rank = int((sizes > noise).sum())
        if not 0 < LOW * rank <= min(parted.shape):
            return None
        # What an adapter adds has its rank in every head; a change of each head has a lower one.
        blocks = (torch.linalg.svdvals(change[head]) for head in heads)
        if any(int((block > noise).sum()) < min(rank, len(block)) for block in blocks):
            return None
        added = (u[:, :rank] * sizes[:rank]) @ v[:rank]
        # A row or a column alone that is damaged is no adapter.
        if any(
            float(added.norm(dim=axis).min()) < 1e-3 * float(added.norm(dim=axis).max())
            for axis in (0, 1)
        ):
            return None
        whole = torch.zeros_like(change)
        whole[list(heads)] = added.view(len(heads), *change.shape[1:])
        parameters: tuple[tuple[str, object], ...] = (("rank", rank),)
        text = f"rank {rank}"
        if len(heads) < len(right):
            parameters, text = (*parameters, ("heads", heads)), f"{text}, {_list_heads(heads)}"
        edit = Edited({role: lambda x: x + whole.to(x.dtype)}, parts=WEIGHTS)
        return Move(MapName(ADAPTERS_MERGED, text, (role,), 0, parameters), edit)


def _repeats_head(move: Move) -> bool:
    """True for one head in all places, which is no order of shards where nobody has as many."""
    shards = dict(move.name.parameters).get("shards")
    return shards is not None and shards not in families.RANKS


def _key_of_change(move: Move, roles: set[str], owner: _Search) -> object:
    change = move.change
    if move.kind != TENSORS or not isinstance(change, Taken) or not isinstance(change.step, RowMap):
        return object()
    index = change.step.index_over_roles(owner.sizes)
    spans = owner.sizes.spans()
    return (
        change.parts,
        *(index[spans[r]].numpy().tobytes() for r in sorted(roles & spans.keys())),
    )


def _parted_heads(ours: Tensor, right: Tensor, tolerance: float) -> tuple[int, ...]:
    size = float(right.square().mean().sqrt())
    apart = (ours - right).abs().flatten(1).amax(1) > tolerance * size
    return tuple(apart.nonzero().flatten().tolist())


def _snap(x: Tensor, right: Tensor, tolerance: float) -> Tensor:
    """Return weights with the right numbers, or rows of 0, where noise is all that is apart.

    Where the right ones are stored in float32, so are all. A bias may have them in other places.
    """
    x = x.float().double() if torch.equal(right.float().double(), right) else x
    limit = tolerance * right.square().mean().sqrt()
    if x.dim() == 1:
        order, ranked = x.argsort(), right.sort().values
        if bool(((x[order] - ranked).abs() <= limit).all()):
            return x.index_copy(0, order, ranked)
    rows = x.abs() if x.dim() < 3 else x.abs().amax(-1, keepdim=True)
    x = torch.where(rows <= limit, torch.zeros_like(x), x)
    return torch.where((x - right).abs() <= limit, right, x)


def _list_heads(heads: Sequence[int]) -> str:
    return format_noun_with_numbers("head", heads)


def _limit(
    move: Move, roles: tuple[str, ...], heads: tuple[int, ...], parts: tuple[str, ...]
) -> Move:
    def named(name: MapName) -> MapName:
        parameters = (*name.parameters, ("heads", heads))
        text = f"{name.text}, {_list_heads(heads)}" if name.text else _list_heads(heads)
        return replace(name, roles=roles, text=text, parameters=parameters)

    change = Limited(move.change, roles, heads, parts=parts)
    return Move(named(move.name), change, tuple(map(named, move.equals)))


def _list_edits(role: str, is_biased: bool, *, is_read: bool) -> Iterator[Move]:
    """Yield changes of all numbers of a role: its zeros alone, if it is read off outputs."""
    for parts in (BOTH, WEIGHTS, BIASES) if is_biased else (WEIGHTS,):
        if "weights" in parts:
            yield name_zeros(role, parts)
        if not is_read:
            yield Move(MapName(SIGN, "", (role,)), Edited({role: torch.neg}, parts=parts))
            yield from (name_rounding(role, dtype, parts) for dtype in ROUNDED)
    if is_biased and not is_read:
        yield Move(MapName(BIAS_MISSING, "", (role,)), Dropped((role,), parts=BIASES))


def _zero_heads(
    cause: Cause, role: str, heads: tuple[int, ...], parts: tuple[str, ...] = BIASES
) -> Move:
    name = MapName(cause, _list_heads(heads), (role,), 0, (("heads", heads),))
    cleared = Edited({role: torch.zeros_like}, parts=parts)
    return Move(name, Limited(cleared, (role,), heads, parts=parts))
