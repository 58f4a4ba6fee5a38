"""Search for the causes why recorded calls and a model part, and what they explain, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.pairs import find_best_pair
from headwise.diagnosis.repairs.lines import Repair, write_repair, write_weights
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import WHOLE, Gap, Gaps, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.diagnosis.trials import NamedCause, find_best_single_cause
from headwise.function.lines import ON_WEIGHTS, Code
from headwise.function.records import STAGE_OF, STAGES
from headwise.function.rounding import is_coarser
from headwise.identify.catalogue import (
    CAUSES,
    HEADS_GONE,
    KV_HEADS_MERGED,
    PROJECTED,
    SHARED_KEY_WIDTH,
    Cause,
)
from headwise.identify.comparison import (
    FoundCause,
    FunctionComparison,
    PartedStage,
    StageGaps,
    format_noun_with_numbers,
)
from headwise.identify.results import Verdict

MOST_CAUSES = 4


class CauseSearchResult(NamedTuple):
    """Causes that were named, and what they leave unexplained."""

    causes: tuple[NamedCause, ...]
    left: Gaps


def search_causes(
    evidence: Evidence, causes: Sequence[Cause], *, in_pairs: bool = True
) -> CauseSearchResult:
    """Name the causes why recorded calls part from a model.

    One cause after the other is put into the model, that which explains most stages first. Where
    no cause makes a stage exact, pairs are tried, if ``in_pairs``. An interruption or the end of
    the budget leaves what was named before.
    """
    named: list[NamedCause] = []
    while evidence.gaps.cells_beyond_rounding and len(named) < MOST_CAUSES:
        untried = "causes"
        try:
            chosen, firsts = find_best_single_cause(evidence, causes)
            # A cause that does not explain one of its stages may have been there nevertheless,
            # with another fault, where the last one is in all its stages.
            if not chosen and named and named[-1].is_partial:
                everywhere = Evidence.of(named[-1].variant.model, evidence.calls)
                chosen, _ = find_best_single_cause(everywhere, causes)
            if not chosen:
                limited = replace(evidence, fitted={}, is_limited=True)
                chosen, parts = find_best_single_cause(limited, causes)
                firsts += parts
            untried = "pairs of causes"
            if not chosen and in_pairs:
                chosen = find_best_pair(evidence, causes, firsts)
        except watch.STOPS as error:
            watch.current().stop(error, untried)
            break
        if not chosen:
            break
        named += [
            replace(each, size=evidence.gaps.total_clipped_size(each.cells)) for each in chosen
        ]
        evidence = Evidence.of(chosen[-1].model, evidence.calls)
    return CauseSearchResult(tuple(named), evidence.gaps)


QUERIES = ("q", "q after norm", "q after rotary")


@dataclass(frozen=True, eq=False)
class ExplainedCalls:
    """Calls that were recorded, and the model that should predict them."""

    model: AttentionModel  # the attention that the recorded one should equal
    calls: Sequence[RecordedCall]
    names: Sequence[str]  # of the input of each call, for reports
    stored: torch.dtype = torch.float64  # of the recorded weights, which rounds what they were
    candidates: Sequence[Cause] = CAUSES  # that may be named
    side: str = "first"  # of the recorded one, for reports
    language: str = ""  # of the recorded one where it is code: "torch", "numpy"; "" for a layer
    in_pairs: bool = True  # tried where no cause explains a stage alone

    @cached_property
    def search(self) -> CauseSearchResult:
        """The causes why the calls part from the model.

        What they do not explain to the rounding of the run is explained to the rounding of the
        stored weights, if that leaves nothing.
        """
        if self.has_other_rows:
            return self._search_beside_gone_heads
        evidence = Evidence(self.model, self.calls, self.gaps)
        named = search_causes(evidence, self.candidates, in_pairs=self.in_pairs)
        if named.left.cells_beyond_rounding and self._has_weights_in_narrower_dtype:
            calls = [replace(call, dtype=self.stored) for call in self.calls]
            evidence = Evidence.of(self.model, calls)
            coarse = search_causes(evidence, self.candidates, in_pairs=self.in_pairs)
            if coarse.causes and not coarse.left.cells_beyond_rounding:
                model = coarse.causes[-1].model
                if all(self._is_output_in_dtype_of_weights(call, model) for call in self.calls):
                    return coarse
        return named

    @property
    def _search_beside_gone_heads(self) -> CauseSearchResult:
        """The heads that are gone, which alone change the number of rows, and causes beside.

        Kv heads of those that are left may have been merged.
        """
        evidence = Evidence(self.model, self.calls, self.gaps)
        gone = search_causes(evidence, (HEADS_GONE, KV_HEADS_MERGED, SHARED_KEY_WIDTH))
        if not gone.causes:
            return gone
        evidence = Evidence.of(gone.causes[-1].model, self.calls)
        beside = search_causes(evidence, self.candidates)
        return CauseSearchResult((*gone.causes, *beside.causes), beside.left)

    @property
    def explains_all(self) -> bool:
        """True if the causes leave nothing beyond rounding."""
        return not self.search.left.cells_beyond_rounding

    @cached_property
    def has_other_rows(self) -> bool:
        """True if queries, values or outputs have another number of channels than the model's."""
        sizes = self.model.sizes
        heads, out_dim = sizes["heads"], sizes["out_dim"]
        rows = dict.fromkeys(QUERIES, heads * sizes["head_dim"]) | {
            "head outputs": heads * sizes["value_dim"]
        }
        for call in self.calls:
            for stage, x in call.stages.items():
                if stage == "output" and x.shape[2] != out_dim:
                    return True
                if stage in rows and x.shape[1::2].numel() != rows[stage]:
                    return True
            # Weights alone do not tell whether the same rows were split into other heads.
            if rows.keys().isdisjoint(call.stages) and "weights" in call.stages:
                return call.stages["weights"].shape[1] != heads
        return False

    def _describe_shapes(self, stage: str) -> str:
        call = next(call for call in self.calls if stage in call.stages)
        recorded = call.stages[stage].shape
        axes, noun = ((1,), "heads") if stage in ("scores", "weights") else ((1, 3), "heads")
        expected = self.model.heads_and_width(stage)[: len(axes)]
        if stage == "output":
            axes, noun, expected = (2,), "channels", self.model.projection("o")[0].shape[2:]
        pair = [tuple(recorded[axis] for axis in axes), tuple(expected)]
        if pair[0] == pair[1]:
            return ""
        first, second = pair if self.side == "first" else pair[::-1]
        if first[1:] == second[1:]:
            return f"{first[0]} {noun} against {second[0]}"
        return f"{first[0]} heads of {first[1]} channels against {second[0]} of {second[1]}"

    @cached_property
    def gaps(self) -> Gaps:
        """The gaps between the calls and the model, before any cause."""
        return measure_gaps(self.model, self.calls)

    def with_outputs_alone(self, runs: Runs | None) -> ExplainedCalls:
        """Return the calls without the stages before the output."""

        def strip(call: RecordedCall) -> RecordedCall:
            return replace(call, stages={"output": call.stages["output"]}, runs=runs)

        return replace(self, calls=[call.change(strip) for call in self.calls])

    @property
    def causes(self) -> tuple[FoundCause, ...]:
        """The causes as they are reported."""
        causes = self.search.causes
        everything = sum(each.size for each in causes if not each.partner)
        everything += max((each.size for each in causes if each.partner), default=0.0)
        everything += self.search.left.total_clipped_size(self.search.left.cells_beyond_rounding)
        repairs = self._repairs
        return tuple(
            FoundCause(
                name=each.name,
                parameters={**each.variant.parameters, **each.variant.details},
                stages=each.stages,
                heads=each.heads,
                repair="\n".join(repair.lines),
                place=repair.place,
                equals=each.equals,
                page=each.cause.page,
                side=self.side,
                share=each.size / everything if everything else 1.0,
                output_left=max(self._compare_output(call, each.model)[0] for call in self.calls),
                partner=each.partner,
            )
            for each, repair in zip(causes, repairs, strict=True)
        )

    @property
    def _repairs(self) -> list[Repair]:
        causes, calls = self.search.causes, self.calls
        words = [Repair((each.variant.repair,)) for each in causes]
        before = [self.model, *(each.variant.model for each in causes)]
        if not self.language or not causes:
            rows = map(write_weights, causes, before)
            return [
                Repair(x, ON_WEIGHTS.words) if x else y for x, y in zip(rows, words, strict=False)
            ]
        scores = (self.model.predict_stage("scores", call) for call in calls)
        code = Code(
            self.model.settings,
            self.model.weights,
            self.language,
            takes_mask=any(call.inputs.mask is not None for call in calls),
            crosses=any(call.inputs.source is not None for call in calls),
            decodes=any(call.earlier for call in calls),
            has_empty_rows=any(bool((x == -torch.inf).all(-1).any()) for x in scores),
        )
        written = (
            write_repair(each, code, model) for each, model in zip(causes, before, strict=False)
        )
        return [code or plain for code, plain in zip(written, words, strict=True)]

    @cached_property
    def gaps_by_position(self) -> dict[tuple[str, int], list[float]]:
        """(stage, number of the call) -> the size of its difference at each position it parts."""
        return {
            (stage, number): gaps.measure_gaps_by_position(self.model, self.calls[number], stage)
            for stage, number in dict.fromkeys(cell[:2] for cell in self.gaps.cells_beyond_rounding)
        }

    def _parted_positions(self, stage: str) -> tuple[tuple[int, ...] | None, str]:
        """Return the tokens at which a stage parts in some call, None for all; and in words."""
        sizes = [
            (self.calls[number].past_key_count + n, size)
            for (name, number), by_position in self.gaps_by_position.items()
            for n, size in enumerate(by_position)
            if name == stage
        ]
        apart = {position for position, size in sizes if size}
        every = {position for position, _ in sizes}
        places = None if apart == every else tuple(sorted(apart))
        return places, describe_positions(apart, every)

    @cached_property
    def outputs_agree(self) -> bool:
        """True if rounding explains every difference of the outputs.

        Where the weights differ, that is the rounding of the dtype in which they are stored.
        """
        if all(is_rounding for _, is_rounding in self._output_gaps):
            return True
        has_other_weights = not {*PROJECTED}.isdisjoint(self.gaps.stages_beyond_rounding)
        return (
            has_other_weights
            and self._has_weights_in_narrower_dtype
            and all(self._is_output_in_dtype_of_weights(call, self.model) for call in self.calls)
        )

    @property
    def agreement(self) -> list[bool]:
        """True for each call whose output differs by rounding at most."""
        return [is_rounding for _, is_rounding in self._output_gaps]

    @property
    def _has_weights_in_narrower_dtype(self) -> bool:
        return any(is_coarser(self.stored, call.dtype) for call in self.calls)

    @property
    def verdict(self) -> Verdict:
        """The verdict, for a check that could have failed and outputs that may not be bitwise."""
        if self.outputs_agree:
            return Verdict.OTHER_WEIGHTS if self.gaps.cells_beyond_rounding else Verdict.TO_ROUNDING
        return Verdict.DIFFERENT if self.search.causes or self.has_other_rows else Verdict.UNKNOWN

    @property
    def parted_stages(self) -> tuple[PartedStage, ...]:
        """The stages that part although the stages before them are the same.

        Some can be compared only once the heads that are gone are left out.
        """
        left = {*self.search.left.cells_beyond_rounding}
        parted = []
        for stage in STAGES:
            first = stage in self.gaps.stages_beyond_rounding
            gaps_of_stage = self.gaps if first else self.search.left
            cells = [each for each in gaps_of_stage.cells_beyond_rounding if each[0] == stage]
            if not cells:
                continue
            heads = tuple(sorted({head for _, _, head in cells}))
            positions, tokens = self._parted_positions(stage)
            inputs = describe_calls(self.calls, {number for _, number, _ in cells})
            parted.append(
                PartedStage(
                    stage=stage,
                    size=max(gaps_of_stage.cells[cell].size for cell in cells),
                    heads=None if WHOLE in heads else heads,
                    probes=tuple(dict.fromkeys(self.names[n] for _, n, _ in cells)),
                    is_explained=left.isdisjoint(cells),
                    positions=positions,
                    pattern=", ".join(filter(None, (tokens, inputs))),
                    shapes=self._describe_shapes(stage),
                )
            )
        return tuple(parted)

    def describe_projections(self, other: AttentionModel | None) -> Iterator[str]:
        """Yield what changed in projections without a cause; ``other`` is known by its weights."""
        left = self.search.left.stages_beyond_rounding
        if not left or watch.current().stopped:
            return
        causes, runs = self.search.causes, self.calls[0].runs
        right = causes[-1].model if causes else self.model
        names = [f"w{role}" for role, stage in STAGE_OF.items() if stage in left]
        changed = {name: other.weights[name] for name in names if other is not None}
        if runs is not None:  # of which each, one alone, makes the outputs
            reads = (read for model, read in runs.unnamed if model is right)
            changed = {name: read.weights[name] for read in reads for name in [f"w{read.role}"]}
        pairs = [(name, x, right.weights[name]) for name, x in changed.items()]
        parted = [each for each in pairs if each[1].shape == each[2].shape]
        parted = [each for each in parted if not torch.equal(*each[1:])]
        if parted:
            yield (", or " if runs else "; ").join(describe_matrix(*each) for each in parted)

    def report(self, **fields: Any) -> FunctionComparison:
        """Return the comparison of the calls; ``fields`` are those that they do not tell."""
        return FunctionComparison(
            **fields,
            output_gap=max(gap for gap, _ in self._output_gaps),
            stages=tuple(s for s in STAGES if any(s in call.stages for call in self.calls)),
            parted=self.parted_stages,
            causes=self.causes,
            gaps=self._stage_gaps,
        )

    @property
    def _stage_gaps(self) -> tuple[StageGaps, ...]:
        heads: dict[tuple[str, int], list[Gap]] = {}
        for (stage, number, _), gap in self.gaps.cells.items():
            heads.setdefault((stage, number), []).append(gap)
        return tuple(
            StageGaps(
                stage=stage,
                probe=self.names[number],
                call=number - self.names.index(self.names[number]),
                sizes=tuple(gap.size for gap in each),
                shares=tuple(gap.share for gap in each),
                by_position=tuple(self.gaps_by_position.get((stage, number), ())),
            )
            for (stage, number), each in heads.items()
        )

    @cached_property
    def _output_gaps(self) -> list[tuple[float, bool]]:
        """For each call the relative difference of its output; True if rounding explains it."""
        compared = [self._compare_output(call, self.model) for call in self.calls]
        return [
            (gap, bool(apart.dim() and _is_within(apart, gaps.allowed_difference(forced))))
            for gap, forced, apart in compared
        ]

    def _is_output_in_dtype_of_weights(self, call: RecordedCall, model: AttentionModel) -> bool:
        _, forced, apart = self._compare_output(call, model)
        if not apart.dim():
            return False
        return _is_within(apart, gaps.allow_output(model, forced.call, forced.stage, self.stored))

    @staticmethod
    def _compare_output(
        call: RecordedCall, model: AttentionModel
    ) -> tuple[float, ForcedStage, Tensor]:
        """Return how far the last recorded stage is from the model's: relative, and each entry."""
        last = [stage for stage in STAGES if stage in call.stages][-1]
        forced = model.prepare_stage(last, replace(call, stages={}))
        mine, theirs = call.stages[last], forced.result
        if mine.shape != theirs.shape:
            return torch.inf, forced, torch.tensor(torch.inf)
        apart = gaps.absolute_difference(theirs, mine)
        size = mine.norm().clamp_min(torch.finfo(torch.float64).tiny)
        return float(apart.norm() / size), forced, apart


def _is_within(apart: Tensor, allowed: Tensor) -> bool:
    return bool(((apart == 0) | (apart <= allowed)).all())


def describe_positions(parted: AbstractSet[int], every: AbstractSet[int]) -> str:
    """Return the positions that part in words; "" where they are all."""
    if not parted or parted == every:
        return ""
    if parted == {min(every)}:
        return "only the first token"
    if parted == every - {min(every)}:
        return "all but the first token"
    if parted == {place for place in every if place >= min(parted)}:
        return f"from position {min(parted)} on"
    if parted == {place for place in every if place <= max(parted)}:
        return f"up to position {max(parted)}"
    return format_noun_with_numbers("position", tuple(sorted(parted)))


def _pads(call: RecordedCall, side: str) -> bool:
    if (mask := call.inputs.mask) is None or mask.shape[-1] < 3:
        return False
    hidden = ~mask[..., -1, :]
    is_left = bool(hidden[..., 0].any())
    return is_left if side == "left" else bool(hidden[..., -2].any()) and not is_left


PATTERNS: Sequence[tuple[str, Callable[[RecordedCall], bool]]] = (
    ("only where a mask is given", lambda call: call.inputs.mask is not None),
    ("only where no mask is given", lambda call: call.inputs.mask is None),
    ("only with padding on the left", lambda call: _pads(call, "left")),
    ("only with padding on the right", lambda call: _pads(call, "right")),
    ("only with padding", lambda call: _pads(call, "left") or _pads(call, "right")),
    ("only in later calls with a cache", lambda call: bool(call.earlier)),
    ("only without earlier calls", lambda call: not call.earlier),
    ("only where a source is given", lambda call: call.inputs.source is not None),
)


def describe_calls(calls: Sequence[RecordedCall], parted: AbstractSet[int]) -> str:
    """Return which calls part in words; ``parted`` are their numbers. "" for all, or no pattern."""
    numbers = set(range(len(calls)))
    if not parted or parted == numbers:
        return ""
    for words, is_so in PATTERNS:
        if parted == {number for number in numbers if is_so(calls[number])}:
            return words
    lengths = [call.key_positions.shape[1] for call in calls]
    longest = max(lengths[number] for number in numbers - parted)
    shortest = min(lengths[number] for number in parted)
    if shortest > longest > 1:
        return f"only in inputs longer than {longest} tokens"
    return ""


def describe_matrix(name: str, other: Tensor, right: Tensor) -> str:
    """Return the rows and columns of weights that differ, and by how much, in words.

    Both are canonical: ``wo`` has a column for each channel of a head, the others a row.
    """
    apart = (other - right).flatten(0, 1)
    apart = (apart.T if name == "wo" else apart).abs()
    parts = []
    for noun, sizes in (("row", apart.amax(1)), ("column", apart.amax(0))):
        numbers = tuple(sizes.nonzero().flatten().tolist())
        is_all = len(numbers) == len(sizes)
        parts.append(
            f"all {len(sizes)} {noun}s" if is_all else format_noun_with_numbers(noun, numbers)
        )
    return (
        f"{name}, read as a matrix, differs in {' and '.join(parts)}: by "
        f"{float(apart.norm() / right.norm()):.2g} of its size, in an entry by "
        f"{float(apart.max()):.2g} at most"
    )


def explain_other_way(
    model: AttentionModel | None, as_stated: Sequence[RecordedCall], *explained: Any, **options: Any
) -> ExplainedCalls | None:
    """Return calls as a model explains them that was the one in doubt before; None for a part.

    So a part is named that the doubtful one has and the known one lacks. None too where the model
    does not predict its own calls, ``as_stated``. The others are arguments of `ExplainedCalls`.
    """
    if model is None or measure_gaps(model, as_stated).cells_beyond_rounding:
        return None
    other = ExplainedCalls(model, *explained, **options)
    return other if other.explains_all else None
