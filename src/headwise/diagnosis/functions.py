"""Comparison of two functions of which nothing but the outputs is known.

Both run on the same input in float32 and in float64. The noise floor of a function is the change of
its output when the input moves by as much as the results of an attention are rounded.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headwise.diagnosis.probes import NamedInputs
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall, visible_keys
from headwise.diagnosis.subjects.function import BlackBox
from headwise.errors import OptionError, ShapeError
from headwise.function.rounding import Roundoff, input_share, relative_difference_norm
from headwise.function.stages import repeat_kv_heads
from headwise.identify.comparison import SEED, FunctionComparison, format_noun_with_numbers
from headwise.identify.results import Diagnosis, Verdict

STEP = 0.15  # of the input, by which scores become a quarter smaller
IN_FLOAT64_ALONE = (
    "in float64 alone they differ by more than rounding: a part computes in float32, or the "
    "difference is too small for float32"
)
MOST = 0.5  # of the queries
MAKE_A_LAYER = (
    "the cause needs a layer on one side: make one of the weights of b, the right one, each stored "
    "as that of torch.nn.Linear, and its biases as q_proj.bias and so on. If you do not know which "
    "is right, compare both with it:",
    '    weights = {"q_proj.weight": wq, "k_proj.weight": wk, "v_proj.weight": wv, '
    '"out_proj.weight": wo}',
    '    layer = headwise.Attention.from_layout(weights, layout="headwise", num_heads=HEADS, '
    "scale=None)",
    "    print(headwise.compare(a, layer))  # if b is causal: from_layout(..., window=(None, 0))",
)


def compare_functions(first: BlackBox, second: BlackBox, probe: NamedInputs) -> Diagnosis:
    """Compare the outputs of two functions on the caller's inputs.

    Raises:
        OptionError: a function fails on them, in float32 and in float64.
        ShapeError: their outputs have other shapes.
    """
    runs = []
    for dtype in (torch.float32, torch.float64):
        pair = _FunctionPair(first.in_dtype(dtype), second.in_dtype(dtype), probe.inputs, dtype)
        with suppress(OptionError):
            runs += [pair] if pair.outputs else []
    if not runs:
        runs = [_FunctionPair(first, second, probe.inputs, probe.inputs.x.dtype)]
    finer = runs[-1]
    blind = ""
    if runs[0].differs:
        verdict = Verdict.DIFFERENT
    elif finer.differs:
        verdict, blind = Verdict.INCONCLUSIVE, IN_FLOAT64_ALONE
    elif blind := _describe_insensitivity(finer):
        verdict = Verdict.INCONCLUSIVE
    else:
        is_bitwise = all(torch.equal(*run.outputs) for run in runs)
        verdict = Verdict.SAME if is_bitwise else Verdict.TO_ROUNDING
    comparison = FunctionComparison(
        kinds=(first.kind, second.kind),
        probes=(probe.name,),
        seed=SEED,
        output_gap=finer.gap,
        stages=("output",),
        blind=blind,
        isolated=(*map(str, runs), *(MAKE_A_LAYER if runs[0].differs else ())),
    )
    return Diagnosis(verdict=verdict, function=comparison)


@dataclass(frozen=True)
class _FunctionPair:
    first: BlackBox
    second: BlackBox
    given: Inputs
    dtype: torch.dtype

    @property
    def inputs(self) -> Inputs:
        return self.given.map_tokens(lambda x: x.to(self.dtype))

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        a, b = (each.output(self.inputs).double() for each in (self.first, self.second))
        for function in (self.first, self.second):
            function.require_stateless()
        if a.shape != b.shape:
            raise ShapeError(
                saw=f"outputs of shape {tuple(a.shape)} in a and {tuple(b.shape)} in b",
                needed="two functions whose outputs have the same shape",
                do="compare(lambda x: a(x)[0], b, x) selects one output of several",
            )
        return a, b

    @property
    def gap(self) -> float:
        return relative_difference_norm(*self.outputs)

    @cached_property
    def floors(self) -> list[float]:
        """The noise floor of each: the largest absolute change of its output by rounding."""
        floors, x = [], self.inputs.x
        terms = sum(x.shape[-2:])
        for function, output in zip((self.first, self.second), self.outputs, strict=True):
            share = input_share(terms, function.dtype)
            near = (gaps.perturb(x, "x", draw, share) for draw in range(gaps.DRAWS))
            changes = torch.stack([(self.run_at(function, each) - output).abs() for each in near])
            last = terms * Roundoff.of(function.dtype).u * output.abs()
            finite = [x[x.isfinite()].amax() for x in (changes, last)]  # some are, in each output
            floors.append(float(sum(finite)))
        return floors

    def run_at(self, function: BlackBox, x: Tensor) -> Tensor:
        return function.output(replace(self.inputs, x=x.to(self.dtype))).double()

    @property
    def differs(self) -> bool:
        return bool((gaps.absolute_difference(*self.outputs) > sum(self.floors)).any())

    def __str__(self) -> str:
        apart = float(gaps.absolute_difference(*self.outputs).amax())
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"in {dtype} the outputs differ by {self.gap:.2g} of their size, by {apart:.2g} at "
            f"most; rounding explains {sum(self.floors):.2g}"
        )


def _describe_insensitivity(pair: _FunctionPair) -> str:
    # Along a line of inputs an output bends where its weights change. It is straight where each
    # query gives all its weight to one key, or all values are equal.
    x, keys = pair.inputs.x, pair.inputs.key_source
    # Smaller tokens keep the largest score of a query. A norm may undo that; tokens that are mixed
    # with those before them pass it, but may have another largest score. Their step is as far above
    # rounding as its square, by which the output bends.
    step = input_share(sum(x.shape[-2:]), pair.second.dtype) ** 0.25
    steps = -STEP * x, step * x.roll(1, 1)
    if any(float(_bends(pair, each).double().mean()) > MOST for each in steps):
        return ""
    if keys.shape[1] == 1:
        return "one key: its weight is 1 whatever the scores are"
    if torch.equal(keys, keys[:, :1].expand_as(keys)):
        return "equal tokens: all values are equal, so weights change nothing"
    return "saturated: other scores do not change the outputs, as if each query had one key"


def _bends(pair: _FunctionPair, step: Tensor) -> Tensor:
    """Return True for each query whose output bends along two steps from the input."""
    start, floor = pair.outputs[1], pair.floors[1]
    near, far = (pair.run_at(pair.second, pair.inputs.x + n * step) for n in (1, 2))
    return ((start - 2 * near + far).abs() > 4 * floor).any(-1)


def describe_not_finite(
    calls: Sequence[RecordedCall], names: Sequence[str], side: str
) -> Iterator[str]:
    """Yield where outputs are NaN or infinite, in the first input on which some are."""
    named = zip(names, (call.stages.get("output") for call in calls), strict=True)
    bad = [(name, x) for name, x in named if x is not None and not x.isfinite().all()]
    if not bad:
        return
    name, output = bad[0]
    word = "NaN" if output.isnan().any() else "infinite"
    at = (~output.isfinite()).any(-1)  # (batch, queries)
    sequence = int(at.any(1).nonzero()[0])
    positions = format_noun_with_numbers("position", tuple(at[sequence].nonzero()[:, 0].tolist()))
    more = f", and on {len(bad) - 1} more inputs" if len(bad) > 1 else ""
    yield (
        f"{int(at.sum())} of {at.numel()} outputs of the {side} are {word} on {name}: in sequence "
        f"{sequence}, {positions}{more}"
    )


TOKENS, BATCH = 6, 8
MOST_WEIGHTS = 5  # tokens whose weights are computed from outputs
TOKENS_SEED = 1
UNIT = 2.0**-8  # of which all entries are multiples, so that their sums are exact in float32


@dataclass(frozen=True, eq=False)
class BlackBoxComparison:
    """A function beside the model that it should equal."""

    function: BlackBox
    model: AttentionModel
    widths: tuple[int, int]  # of tokens and of the source
    side: str  # of the function, "first" or "second"
    dtype: torch.dtype  # of the arithmetic, whose rounding is allowed

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """A sentence of each probe, without those on which the function fails."""
        sentences: list[str] = []
        with suppress(OptionError):
            sentences += self._compare_visible_keys()
        with suppress(OptionError):
            sentences += self._compare_one_token()
        return tuple(sentences)

    @property
    def _crosses(self) -> bool:
        return self.widths[0] != self.widths[1]

    def _compare_one_token(self) -> Iterator[str]:
        if "sink" in self.model.weights:  # a share of the weight has no value
            return
        widths = enumerate(self.widths, TOKENS_SEED)
        x, source = (_draw_tokens(BATCH, 1, width, seed) for seed, width in widths)
        inputs = Inputs(x, source if self._crosses else None)
        output, predicted, bound = self._run_both_with_bound(inputs)
        if predicted.shape != output.shape:
            yield f"outputs of the {self.side} have another width"
        elif bool((gaps.absolute_difference(predicted, output) > bound).any()):
            gap = float((predicted - output).norm() / predicted.norm())
            yield (
                f"with one token, which has all the weight, the outputs differ by {gap:.2g}: look "
                "at values, the output projection and what is around the attention first"
            )
        else:
            yield (
                "with one token, which has all the weight, the outputs agree: values and the "
                "output projection are right, and the scores or the weights differ"
            )
            yield from self._compare_recovered_attention_weights()

    def _compare_visible_keys(self) -> Iterator[str]:
        if self._crosses:
            return
        x = _draw_tokens(1, TOKENS, self.widths[0], TOKENS_SEED)
        moved = x.repeat(TOKENS, 1, 1)
        places = torch.arange(TOKENS)
        moved[places, places] = _draw_tokens(1, TOKENS, self.widths[0], TOKENS_SEED + 1)[0]
        output, predicted, bound = self._run_both_with_bound(Inputs(torch.cat([x, moved])))
        if predicted.shape != output.shape or not output.isfinite().all():
            return
        seen, known = (
            ((y[1:] - y[:1]).abs() > 2 * bound.amax()).any(-1).T for y in (output, predicted)
        )  # (queries, keys)
        call = RecordedCall(Inputs(x), {})
        visible = visible_keys(self.model.prepare_stage("scores", call))[0].any(0)
        others = ~torch.eye(TOKENS, dtype=torch.bool)
        if bool((known & others).any()) and not bool((seen & others).any()):
            yield f"each output of the {self.side} depends on its own token alone: it mixes none"
        # A change that rounding would hide in the model says nothing where it is missing.
        elif wrong := (((seen & ~visible) | (known & ~seen)) & others).nonzero().tolist():
            yield self._name_pairs(wrong, "sees" if seen[*wrong[0]] else "does not see")

    def _name_pairs(self, pairs: Sequence[Sequence[int]], verb: str) -> str:
        (query, key), *others = pairs
        more = f", and so for {len(others)} more pairs" if others else ""
        return f"query {query} of the {self.side} {verb} key {key}{more}"

    def _compare_recovered_attention_weights(self) -> Iterator[str]:
        model, axes = self.model, ("heads", "value_dim", "out_dim")
        heads, value_dim, out_dim = (model.sizes[axis] for axis in axes)
        weight, bias = model.projection("o")
        tokens = min(value_dim - 1, out_dim // heads, MOST_WEIGHTS)
        if tokens < 2 or self._crosses:
            return
        inputs = Inputs(_draw_tokens(BATCH, tokens, self.widths[0], TOKENS_SEED + 2))
        output, _, bound = self._run_both_with_bound(inputs)
        run = model.predict_all_stages(RecordedCall(inputs, {}))
        values = repeat_kv_heads(run["v"], heads=heads)
        parts = torch.einsum("bhjd,hdo->bohj", values, weight).flatten(2)
        inverse = torch.linalg.pinv(parts)
        rest = output if bias is None else output - bias
        weights_shown, error = (
            torch.einsum("bwo,bqo->bwq", matrix, x).unflatten(1, (heads, tokens)).mT
            for matrix, x in ((inverse, rest), (inverse.abs(), bound))
        )
        is_hidden = (weights_shown.abs() <= error) & (run["weights"] > 2 * error)
        blind = is_hidden.all(1).all(0).diagonal().nonzero().flatten().tolist()
        if blind:  # a change of its token does not show it, since its query changes too
            yield self._name_pairs([(place, place) for place in blind], "does not see")
        apart = ((weights_shown - run["weights"]).abs() > error).flatten(2).any(2).any(0)
        numbers = apart.nonzero().flatten().tolist()
        if numbers:
            nouns = "head" if len(numbers) == 1 else "heads"
            listed = f"{nouns} {', '.join(map(str, numbers))}"
            listed = "all heads" if len(numbers) == heads else listed
            yield f"weights, computed from outputs of {tokens} tokens, differ in {listed}"

    def _run_both_with_bound(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        output = self.function.output(inputs)
        forced = self.model.prepare_stage("output", RecordedCall(inputs, {}, self.dtype))
        return output.double(), forced.result, gaps.allowed_difference(forced)


def _draw_tokens(batch: int, tokens: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, width, generator=generator)
    return (x / UNIT).round() * UNIT
