"""Inputs of a comparison.

They are those of a recording, the caller's, or some that are made from a seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall, visible_keys
from headwise.diagnosis.subjects.function import SLOW, BlackBox
from headwise.diagnosis.subjects.recording import Recording
from headwise.diagnosis.subjects.subject import Subject
from headwise.errors import MaskError, OptionError, ShapeError
from headwise.identify.comparison import SEED

BATCH = 2
QUERIES, KEYS, LONG, FEW = 11, 7, 40, 3  # tokens; KEYS of cross attention
DRAWS = 8  # of the same tokens, which dropout changes each time
PADDING = (1, 4)  # tokens of each sequence
SEEN = 0.6  # of the keys, under a mask for each head
SIDES = ("right", "left")  # of padding
LENGTHS = (QUERIES, FEW, LONG)
LONGEST = 256  # tokens, for a window; longer inputs take minutes where a cause is looked for
UNIT = 2.0**-8  # of which all entries are multiples, so that their sums are exact in float32


@dataclass(frozen=True)
class NamedInputs:
    """Inputs with the words by which a report names them."""

    name: str
    inputs: Inputs
    is_optional: bool = False  # left out where a subject fails on them
    is_made_causal: bool = False  # a causal mask was added to them

    @property
    def has_short_calls(self) -> bool:
        """True if each call has one token: many calls, which show what fewer ones show too."""
        return len(self.inputs.steps) > 1 and {*self.inputs.steps} == {1}


def make_probe_inputs(
    widths: tuple[int, int],
    *,
    crosses: bool,
    takes_mask: bool = True,
    window: tuple[int, int] = (0, 0),
    parts: bool = False,
    lengths: tuple[int, int, int] = LENGTHS,
    seed: int = SEED,
) -> list[NamedInputs]:
    """Return inputs that show a difference if there is one.

    Random tokens of usual size, larger ones (which make attention sharp, and reach a softcap), a
    few tokens, fewer than a window holds, and padding on either side, of unequal lengths. The
    larger tokens are sums of the usual ones, which shows whether a projection is linear also where
    there are fewer tokens than columns. In self-attention, a sequence longer than the window, under
    a causal mask, shows frequencies; one without the mask shows a window of later keys.

    ``widths`` are those of tokens and of the source; ``window`` is the number of keys before and
    after a query in a window, 0 for none. ``parts`` adds one token, in which values and the output
    projection show alone, and two tokens, which show scores without windows. ``lengths`` are those
    of usual, few and many tokens.
    """
    queries, few, many = lengths
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Inputs:
        keys = KEYS if length >= FEW else length
        source = _draw_tokens(keys, widths[1], generator) if crosses else None
        return Inputs(_draw_tokens(length, widths[0], generator), source)

    usual = tokens(queries)
    larger = usual.map_tokens(lambda x: _three_times(x, generator))
    name = f"{queries} random tokens"
    probes = [NamedInputs(name, usual), NamedInputs(f"{name}, three times as large", larger)]
    if few < queries:
        probes.append(NamedInputs(f"{few} random tokens", tokens(few)))
    if not crosses and (takes_mask or many > queries):
        length = max(many, window[0] + FEW) if many == LONG else many
        long = NamedInputs(f"{length} random tokens", tokens(length))
        probes.append(_under_causal_mask(long) if takes_mask else long)
        if takes_mask and many == LONG and (length := window[1] + FEW) > queries:
            probes.append(NamedInputs(f"{length} random tokens", tokens(length)))
    if takes_mask:
        probes += [_pad(tokens(queries), side) for side in SIDES]
    if parts:
        probes.append(NamedInputs("one random token", tokens(1), is_optional=True))
        probes.append(NamedInputs("2 random tokens", tokens(2), is_optional=True))
    return probes


def make_few_tokens(
    widths: tuple[int, int], most: int, *, crosses: bool, seed: int = SEED
) -> list[NamedInputs]:
    """Return one token and more, up to a number, of which dropout leaves some in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    probes = []
    for length in range(1, min(most, FEW) + 1):
        source = _draw_tokens(length, widths[1], generator) if crosses else None
        name = f"{length} random tokens" if length > 1 else "one random token"
        inputs = Inputs(_draw_tokens(length, widths[0], generator), source)
        probes.append(NamedInputs(name, inputs.map_tokens(lambda x: x.repeat(DRAWS, 1, 1))))
    return probes


def _draw_tokens(length: int, width: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)
    return ((x / UNIT).round() * UNIT).float()


def _three_times(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return sums of tokens, three times as large."""
    flat = x.flatten(0, 1)
    first, second, third = (flat[torch.randperm(len(flat), generator=generator)] for _ in range(3))
    return (2 * first - 2 * second + third).reshape(x.shape)


def _pad(inputs: Inputs, side: str) -> NamedInputs:
    mask = _hide_keys(inputs, side)
    if inputs.source is None:  # a token attends to itself: no row is empty, whatever the window is
        mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool)
    name = f"{inputs.x.shape[1]} random tokens under a mask of padding on the {side}"
    return NamedInputs(name, replace(inputs, mask=mask))


def _hide_keys(inputs: Inputs, side: str) -> Tensor:
    """Return a mask that hides the keys of padding from all queries, (batch, 1, 1, keys)."""
    keys = inputs.key_source.shape[1]
    hidden = torch.tensor(PADDING)[:, None].clamp(max=keys - 1)
    index = torch.arange(keys)
    return (index < keys - hidden if side == "right" else index >= hidden)[:, None, None]


STEP_SEED = 1  # of tokens in calls with a cache
REACHED = 40.0  # by scores, which shows a softcap of 50 or 100; the exponential is still float32
LARGEST = 10  # power of two by which tokens grow to reach a softcap
TINY = torch.finfo(torch.float64).tiny
ComparisonInputs = Tensor | np.ndarray | Inputs | Mapping[str, Any]


def read_inputs(inputs: ComparisonInputs | None) -> Tensor | Inputs | Mapping[str, Any] | None:
    """Return the inputs, an array as a tensor; raise OptionError for other types or no numbers."""
    if inputs is None or isinstance(inputs, Tensor | Inputs | Mapping):
        return inputs
    seen, cause = f"inputs of type {type(inputs).__name__}", None
    if isinstance(inputs, np.ndarray):
        try:
            return torch.from_numpy(inputs)
        except (TypeError, ValueError) as error:
            seen, cause = f"an array of {inputs.dtype} as the inputs", error
    raise OptionError(
        saw=seen,
        needed="a tensor or a NumPy array of numbers, Inputs, or keyword arguments of a model",
        do="make a tensor: inputs=torch.as_tensor(values)",
    ) from cause


def choose_inputs(
    first: Subject, second: Subject, inputs: Tensor | Inputs | Mapping[str, Any] | None
) -> list[NamedInputs]:
    """Return the inputs on which two subjects are compared.

    Raises:
        OptionError: nothing but outputs is known of both, inputs beside a recording or that are not
            finite, or keyword arguments, which only models take.
        ShapeError: other widths of the two, or of the inputs, or no token.
    """
    if isinstance(inputs, Mapping):
        raise OptionError(
            saw="keyword arguments as the inputs of attention layers",
            needed="(batch, tokens, width), or two whole models",
            do="compare(a, b, x), or compare(model_a, model_b, {'input_ids': tokens})",
        )
    subjects = (first, second)
    sizes = [each.input_widths for each in subjects if each.input_widths is not None]
    sizes = sizes or [_read_widths_of_given(subjects, inputs)]
    if len({*sizes}) > 1:
        (mine, my_source), (theirs, their_source) = sizes
        noun, a, b = ("tokens", mine, theirs)
        if mine == theirs:
            noun, a, b = "sources", my_source, their_source
        raise ShapeError(
            saw=f"a takes {noun} of width {a}, b of width {b}",
            needed="two attentions of the same input",
            do="compare layers of the same model",
        )
    recording = next((each for each in subjects if isinstance(each, Recording)), None)
    if recording is not None:
        if inputs is not None:
            raise OptionError(
                saw=f"inputs beside {recording.kind}",
                needed="the input that the recording was made with",
                do="leave inputs out",
            )
        _require_matching_shapes(recording.inputs, sizes[0], recording.kind)
        return [NamedInputs(f"the input of {recording.kind}", recording.inputs)]
    if inputs is None:
        return make_probes(subjects, sizes[0])
    given = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
    _require_matching_shapes(given, sizes[0], "your input")
    for function in subjects:
        if isinstance(function, BlackBox):
            function.fit([given])
    name = f"your input of {given.x.shape[1]} tokens"
    return _add_causal_mask(subjects, [NamedInputs(name, given)])


def _read_widths_of_given(
    subjects: Sequence[Subject], inputs: Tensor | Inputs | None
) -> tuple[int, int]:
    kinds = " and ".join(subject.kind for subject in subjects)
    if any(isinstance(each, Recording) for each in subjects):
        raise OptionError(
            saw=f"{kinds}, of which nothing but the outputs is known",
            needed="one layer at least whose weights and settings can be read",
            do="build the layer that one of them should be: headwise.Attention(...), or pass the "
            "module that also holds the output projection",
        )
    if inputs is None:
        raise OptionError(
            saw=f"{kinds}, of which nothing but the outputs is known, and no inputs",
            needed="an input of (batch, tokens, width) for both",
            do="compare(a, b, torch.randn(2, 12, 512)), with the width that they take. For the "
            "cause too, pass a layer: the module that also holds the output projection",
        )
    given = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
    return given.x.shape[-1], given.key_source.shape[-1]


def make_probes(subjects: Sequence[Subject], sizes: tuple[int, int]) -> list[NamedInputs]:
    """Return headwise's own inputs; without masks or a source where a subject takes none."""
    crosses = sizes[0] != sizes[1]
    windows = [each.model.settings.sides or (0, 0) for each in subjects if each.model is not None]
    left, right = (
        max((n for n in sides if n is not None and n < LONGEST), default=0)
        for sides in zip(*windows, strict=True)
    )
    takes_mask = all(each.takes_mask for each in subjects)
    functions = [each for each in subjects if isinstance(each, BlackBox)]
    lengths = LENGTHS
    for function in functions:  # one, since the other side is known
        lengths = _fit_lengths(function, sizes, crosses=crosses)
    probes = make_probe_inputs(
        sizes,
        crosses=crosses,
        takes_mask=takes_mask,
        window=(left, right),
        parts=bool(functions),
        lengths=lengths,
    )
    if not crosses and all(each.takes_source for each in subjects):
        [probe, *_] = make_probe_inputs(sizes, crosses=True)
        probes.append(replace(probe, name=f"{probe.name} that attend to {KEYS} others"))
    if all(each.step_arguments is not None or each.model is not None for each in subjects):
        probes += make_step_probes(subjects, sizes[0], left)
    capped = [each.model for each in subjects if each.model and each.model.settings.cap]
    for model in capped[:1]:
        assert model.settings.cap is not None
        probes.append(_enlarge_to_reach(model.settings.cap, probes[0], model))
    return _use_masks_that_run(subjects, _add_causal_mask(subjects, probes))


# Lengths that are tried: near to the usual one, and those of tables of positions.
TRIED = (
    *range(QUERIES, 1, -1),
    *range(QUERIES + 1, 34),
    49,
    50,
    64,
    65,
    77,
    128,
    196,
    197,
    256,
    257,
    512,
    1024,
    1,
)


def _fit_lengths(
    function: BlackBox, sizes: tuple[int, int], *, crosses: bool
) -> tuple[int, int, int]:
    """Return numbers of usual, few and many tokens on which a function runs, in a form that fits.

    Others are tried where it does not run on the usual ones.
    """

    def draw(length: int) -> Inputs:
        generator = torch.Generator().manual_seed(SEED)
        source = _draw_tokens(KEYS, sizes[1], generator) if crosses else None
        return Inputs(_draw_tokens(length, sizes[0], generator), source)

    inputs = None if function.decodes else function.fit(map(draw, TRIED))
    if inputs is None or (usual := inputs.x.shape[1]) == QUERIES:
        return LENGTHS
    few, many = (
        next((n for n in tried if function.fit([draw(n)])), usual)
        for tried in ((FEW, *range(2, usual)), (LONG, *range(LONG - 1, usual, -1)))
    )
    is_only = (few, many) == (usual, usual)
    function.lengths = f"of {usual} tokens alone" if is_only else f"of {few} to {many} tokens"
    return usual, few, many


def make_further_probes(subjects: Sequence[Subject]) -> list[NamedInputs]:
    """Return inputs that show a long window, a large softcap, or one head's mask for all heads.

    They are those of self-attention: many tokens, tokens whose scores are large, and a mask for
    each head.
    """
    models = [each.model for each in subjects if each.model is not None]
    sizes = [each.input_widths for each in subjects if each.input_widths is not None]
    if not any(isinstance(each, BlackBox) for each in subjects) or not models or not sizes:
        return []
    width, source_width = sizes[0]
    if width != source_width:
        return []
    generator, length = torch.Generator().manual_seed(STEP_SEED), LONGEST + FEW
    long = Inputs(_draw_tokens(length, width, generator)[:1].contiguous())
    usual = NamedInputs(f"{QUERIES} random tokens", Inputs(_draw_tokens(QUERIES, width, generator)))
    probes = [NamedInputs(f"{length} random tokens", long)]
    if models[0].settings.cap is None:
        probes.append(_enlarge_to_reach(REACHED, usual, models[0]))
    if (heads := models[0].settings.num_heads) > 1 and all(each.takes_mask for each in subjects):
        mask = torch.rand(BATCH, heads, QUERIES, QUERIES, generator=generator) < SEEN
        given = replace(usual.inputs, mask=mask | torch.eye(QUERIES, dtype=torch.bool))
        probes.append(NamedInputs(f"{usual.name} under a mask for each head", given))
    return _add_causal_mask(subjects, probes)


def _use_masks_that_run(
    subjects: Sequence[Subject], probes: Sequence[NamedInputs]
) -> list[NamedInputs]:
    """Return the inputs with masks of the shapes that functions take.

    A mask of padding hides a key from all queries, and much code takes no other: (batch, 1, 1,
    keys). Such a mask hides a token from itself too. Code that reads the row of the first query,
    ``mask[:, 0, 0]``, runs on any mask, and gets these alone.
    """
    functions = [each for each in subjects if isinstance(each, BlackBox)]
    masked = [each for each in probes if each.inputs.mask is not None and not each.inputs.steps]
    if not functions or not masked:
        return [*probes]
    if any(each.seconds >= SLOW for each in functions):  # in which one call tells of all
        masked = masked[-1:]
    known = [each.model for each in subjects if each.model is not None]
    for function in functions:
        function.find_mask_rows(masked[-1].inputs)
    for squeezes in (False, True):
        for function in functions:
            function.squeezes_masks = squeezes
        taken = {each.name: _find_mask(functions, known, each) for each in masked}
        if any(each is not None for each in taken.values()):
            break
    rest = taken[masked[-1].name] is not None
    kept = []
    for probe in probes:
        bare = replace(probe.inputs, mask=None)
        without = NamedInputs(probe.name.partition(" under a ")[0], bare)
        usual = probe if rest or probe.inputs.steps else without
        kept.append(taken.get(probe.name, usual) or without)
    return list({each.name: each for each in kept}.values())


def _find_mask(
    functions: Sequence[BlackBox], known: Sequence[AttentionModel], probe: NamedInputs
) -> NamedInputs | None:
    inputs, mask = probe.inputs, probe.inputs.mask
    assert mask is not None
    batch, queries = inputs.x.shape[:2]
    masks = [mask, mask.expand(batch, 1, queries, -1)]
    is_padding = any(each.reads_one_row for each in functions)
    if side := next((side for side in SIDES if f"padding on the {side}" in probe.name), ""):
        masks.append(_hide_keys(inputs, side))
    masks = [each for each in masks if each.shape[2] == 1 or not is_padding]
    for tried in masks:
        given = replace(inputs, mask=tried)
        # A mask loses the axis of the batch or that of the queries, if one of them has length 1.
        fits = not functions[0].squeezes_masks or 1 in (tried.shape[0], tried.shape[2])
        scores = (model.prepare_stage("scores", RecordedCall(given, {})) for model in known)
        sees = all(bool(visible_keys(x).any(-1).all()) for x in scores) or tried is mask
        if fits and sees and all(each.accepts(given) for each in functions):
            return replace(probe, inputs=given)
    return None


STEPS = (1, 3, 1)  # tokens of the calls after the first one
AT_FIRST = 5  # tokens of the first call, at least
ONES = 8  # calls of one token
PADDED = (1, 3)  # tokens of each sequence, fewer than those of the first call


def make_step_probes(subjects: Sequence[Subject], width: int, left: int) -> list[NamedInputs]:
    """Return inputs of calls with a cache, where a subject decodes: one token each, and chunks.

    The first chunk fills a window of ``left`` keys before the query. Where masks are taken, prompts
    of unequal lengths have padding on their left.
    """
    taken = [each.step_arguments for each in subjects if each.step_arguments is not None]
    if not any(each.decodes for each in subjects):
        return []
    chunks = (max(AT_FIRST, left + 1), *STEPS)
    x = _draw_tokens(sum(chunks), width, torch.Generator().manual_seed(STEP_SEED))
    name = f"{sum(chunks)} random tokens in calls of {', '.join(map(str, chunks))}"
    single = Inputs(x[:, :ONES], steps=(1,) * ONES)
    probes = [
        NamedInputs(name, Inputs(x, steps=chunks), is_optional=True),
        NamedInputs(f"{ONES} random tokens, one a call", single, is_optional=True),
    ]
    if all("mask" in names for names in taken):
        padding, keys = torch.tensor(PADDED)[:, None], torch.arange(sum(chunks))
        mask = (keys >= padding)[:, None, None] | torch.eye(len(keys), dtype=torch.bool)
        padded = Inputs(x, mask=mask, steps=chunks)
        if all("positions" in names for names in taken):
            padded = replace(padded, positions=(keys - padding).clamp(min=0))
        words = f"{name}, under a mask of padding on the left"
        probes.append(NamedInputs(words, padded, is_optional=True))
    return probes


def _enlarge_to_reach(cap: float, probe: NamedInputs, model: AttentionModel) -> NamedInputs:
    """Return larger tokens, whose largest score is about the cap: half of it is cut off by 8 %."""
    bare = model.with_settings(softcap=None)
    scores = bare.predict_stage("scores", RecordedCall(probe.inputs, {}))
    share = float(scores.masked_fill(scores.isinf(), 0.0).abs().max()) / cap
    # Scores grow with the square of the tokens. A power of two leaves them exact.
    factor = 2 ** min(LARGEST, max(1, round(-math.log2(max(share, TINY)) / 2)))
    larger = probe.inputs.map_tokens(lambda x: factor * x)
    return NamedInputs(f"{probe.name}, {factor} times as large", larger)


def _add_causal_mask(
    subjects: Sequence[Subject], probes: Sequence[NamedInputs]
) -> list[NamedInputs]:
    # The model of an attention module of transformers makes that mask.
    states = [each.is_causal for each in subjects]
    if True not in states or None not in states or not all(each.takes_mask for each in subjects):
        return [*probes]
    return [_under_causal_mask(probe) for probe in probes]


def _under_causal_mask(probe: NamedInputs) -> NamedInputs:
    inputs = probe.inputs
    size = inputs.x.shape[1], inputs.key_source.shape[1]
    causal = torch.ones(size, dtype=torch.bool).tril()
    mask = causal if inputs.mask is None else causal & inputs.mask
    words = "" if " under a " in probe.name else " under a causal mask"
    is_new = inputs.mask is None or not torch.equal(mask, inputs.mask.expand_as(mask))
    return NamedInputs(f"{probe.name}{words}", replace(inputs, mask=mask), is_made_causal=is_new)


def _require_matching_shapes(inputs: Inputs, sizes: tuple[int, int], name: str) -> None:
    source = "x" if inputs.source is None else "source"
    for what, x, width in (("x", inputs.x, sizes[0]), (source, inputs.key_source, sizes[1])):
        if x.dim() != 3 or x.shape[2] != width:
            raise ShapeError(
                saw=f"{what} of shape {tuple(x.shape)} in {name}",
                needed=f"(batch, tokens, {width})",
                do=f"give one sequence as {what}[None]"
                if x.dim() == 2
                else f"give the {what} that the layer takes, before its projections",
            )
        if not x.numel():
            raise ShapeError(
                saw=f"{what} of shape {tuple(x.shape)} in {name}, without a token",
                needed="one sequence of one token at least",
                do="give tokens, or leave inputs out for those that headwise makes",
            )
        if not x.isfinite().all():
            count = x.numel() - int(x.isfinite().sum())
            raise OptionError(
                saw=f"{what} in {name} with {count} of {x.numel()} entries NaN or infinite",
                needed="finite tokens, also where a mask hides them",
                do=f"look at what makes {what}, and set the tokens of padding to 0",
            )
    if (mask := inputs.mask) is None:
        return
    if mask.dtype != torch.bool:
        raise MaskError(
            saw=f"a mask of {mask.dtype} in {name}",
            needed="a boolean mask, where True attends",
            do="mask=added == 0 for a mask that is added to scores",
        )
    keys = sum(inputs.steps) or inputs.key_source.shape[1]
    shape = (len(inputs.x), mask.shape[1], inputs.x.shape[1], keys)
    if any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        raise ShapeError(
            saw=f"a mask of shape {tuple(mask.shape)} in {name}",
            needed=f"a mask that broadcasts to (batch, heads, queries, keys) = ({shape[0]}, heads, "
            f"{shape[2]}, {shape[3]})",
            do="give padding as mask[:, None, None]",
        )
