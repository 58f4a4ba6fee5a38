"""What runs on an accelerator, without one: nothing mixes devices, and nothing reads a value.

Tensors are torch's fake ones: they have a shape and a device, and no values. An operation on two
devices raises, and so does reading a value. The device is "cuda" in the CUDA build of torch, which
has no backward pass without a card; a device of Python's own, "card", has one in every build.
`test_9_devices.py` runs this file in processes of their own, since "card" stays registered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves

from headwise import Attention, AttentionMatrix, Mask, MultiheadAttention, ScoreBias
from headwise.function import rotary
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import compute_summaries
from headwise.support import tracing
from tests.layers.cases import BATCH, EMBED, HEADS, KEYS, LAYER, QUERIES, SOURCE

HEAD_DIM, KV_HEADS = 10, 2


class Place(NamedTuple):
    """Where a case runs: the device, that of small operands, and with a backward pass or not."""

    device: str
    small: str
    training: bool

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, requires_grad=self.training)

    def integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.small)


Run = Callable[[Place], None]


@contextmanager
def fake_tensors(monkeypatch: pytest.MonkeyPatch, *, training: bool) -> Iterator[None]:
    """Make every new tensor a fake one; headwise reads values of those as it does of real ones."""

    def reads_on_device(tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"  # those on the CPU are checked by other tests

    original = tracing.may_read_values
    for name, module in list(sys.modules.items()):
        if name.startswith("headwise") and vars(module).get("may_read_values") is original:
            monkeypatch.setattr(module, "may_read_values", reads_on_device)
    rotary._cached_frequencies.cache_clear()
    with FakeTensorMode(), torch.set_grad_enabled(training):
        yield
    rotary._cached_frequencies.cache_clear()


def assert_stays(result: Any, place: Place) -> None:
    """All tensors of a result, and the gradients of those that have one, are on the device."""
    tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    assert tensors
    assert {x.device.type for x in tensors} == {place.device}
    loss = [x.sum() for x in tensors if x.requires_grad]
    assert bool(loss) is place.training
    if loss:
        torch.stack([x.float() for x in loss]).sum().backward()


# ---- the matrix ----------------------------------------------------------------------------------


def _masks(place: Place, *, keys: int = KEYS) -> dict[str, Any]:
    device, lengths = place.device, torch.ones(BATCH, dtype=torch.int64, device=place.device)
    shown = torch.ones(BATCH, QUERIES, keys, dtype=torch.bool, device=device)
    return {
        "none": None,
        "causal": Mask.causal(align="bottom-right"),
        "window": Mask.window(4, 1, align="top-left"),
        "lengths": Mask.lengths(queries=lengths, keys=lengths),
        "starts": Mask.starts(queries=lengths, keys=lengths),
        "segments": Mask.segments(shown[..., 0].long(), shown[:, 0].long()),
        "prefix": Mask.prefix(lengths, align="top-left"),
        "where": Mask.where(lambda b, h, q, k: (b + h + q) >= k),
        "dense": Mask.may_attend(shown, axes="batch queries keys"),
        "from torch": Mask.from_torch(~shown[0]),
        "from torch's padding": Mask.from_torch_padding(~shown[:, 0]),
        "from sdpa": Mask.from_sdpa(shown[:, None]),
        "causal, lengths": Mask.causal(align="top-left") & Mask.lengths(keys=lengths),
    }


def _options(place: Place) -> dict[str, dict[str, Any]]:
    slopes = place.floats(HEADS)
    dense = ScoreBias.dense(place.floats(HEADS, QUERIES, KEYS), axes="heads queries keys")
    table = place.floats(HEADS, 2 * KEYS - 1)
    options: dict[str, dict[str, Any]] = {
        "dense bias": {"score_bias": dense},
        "ALiBi": {"score_bias": ScoreBias.alibi(slopes, align="bottom-right")},
        "relative bias": {"score_bias": ScoreBias.relative(table, align="top-left")},
        "softcap and sink": {"softcap": 3.0, "sink": slopes},
    }
    return {name: {"mask": mask} for name, mask in _masks(place).items()} | options


def _readings(A: AttentionMatrix, place: Place) -> Iterator[tuple[str, Any]]:
    v, y = place.floats(BATCH, KV_HEADS, KEYS, 7), place.floats(BATCH, HEADS, QUERIES, 5)
    index = place.integers(2)
    yield "A @ v", A @ v
    yield "as wide as the keys", A @ place.floats(BATCH, KV_HEADS, KEYS, HEAD_DIM)
    yield "dropped", A.dropped(v, dropout_p=0.5)
    yield "outputs and average", A.outputs_and_average(v)
    yield "A.mT @ y", A.mT @ y
    yield "rows", A.rows(index)
    yield "dense", A.dense()
    yield "diagonal", A.diagonal(-2)
    yield "topk", A.topk(3)[0]
    yield "topk of some queries", A.topk(3, queries=index)[0]
    yield "pool", A.pool(4, 5)
    yield "statistics", A.statistics()
    yield "logsumexp", A.logsumexp()
    yield "entropy", A.entropy()
    yield "maximum", A.maximum()
    yield "received", A.received()
    yield "head average", A.head_average()


OPTIONS = tuple(_options(Place("meta", "meta", training=False)))


def read_matrix(place: Place, option: str) -> None:
    """Read a matrix with one option in every way."""
    q, k = (
        place.floats(BATCH, HEADS, QUERIES, HEAD_DIM),
        place.floats(BATCH, KV_HEADS, KEYS, HEAD_DIM),
    )
    A = AttentionMatrix(q, k, **_options(place)[option])
    for _, result in _readings(A, place):
        assert_stays(result, place)
    here = place._replace(training=False)
    assert_stays(A.seen_by(torch.ones(BATCH, QUERIES, dtype=torch.bool, device=place.small)), here)
    for tile in A.tiles(with_scores=True, with_lowest=True):
        assert_stays([x for x in vars(tile).values() if isinstance(x, Tensor)], here)


# ---- layers --------------------------------------------------------------------------------------

LAYERS = tuple((axis, choice) for axis, choices in LAYER.items() for choice in choices)


def _layer(place: Place, axis: str, choice: str) -> Attention:
    options = {"head_dim": HEAD_DIM} | LAYER[axis][choice]
    with unset_fake_temporarily():  # buckets of distances are read, on the CPU, when they are made
        layer = Attention(EMBED, HEADS, **options)
    for module in layer.modules():
        for name, x in module.named_parameters(recurse=False):
            new = torch.zeros(x.shape, device=place.device)
            module.register_parameter(name, nn.Parameter(new, requires_grad=place.training))
        for name, buffer in module.named_buffers(recurse=False):
            empty = torch.zeros(buffer.shape, dtype=buffer.dtype, device=place.device)
            setattr(module, name, empty)
    return layer


def run_layer(place: Place, axis: str, choice: str) -> None:
    """Run the native layer with one of its options."""
    layer = _layer(place, axis, choice)
    x = place.floats(BATCH, QUERIES, EMBED)
    given = (x,) if layer.source_dim == EMBED else (x, place.floats(BATCH, QUERIES, SOURCE))
    assert_stays(layer(*given), place)
    lengths = torch.ones(BATCH, dtype=torch.int64, device=place.device)
    mask = Mask.lengths(queries=lengths, keys=lengths)
    assert_stays(layer(*given, mask=mask, gate=place.floats(HEADS)), place)


def run_masks(place: Place) -> None:
    """Run the native layer with every kind of mask, and read its heads."""
    layer = _layer(place, "kv_heads", "2")
    x = place.floats(BATCH, QUERIES, EMBED)
    for mask in _masks(place, keys=QUERIES).values():
        assert_stays(layer(x, mask=mask), place)
    assert_stays(layer.matrix(x).statistics(), place)
    assert_stays(layer.head_outputs(x), place)


def run_cache(place: Place, axis: str, choice: str) -> None:
    """Take steps with a cache: several tokens, one, and tokens of unequal number."""
    layer = _layer(place, axis, choice)
    lengths = torch.ones(BATCH, dtype=torch.int64, device=place.device)
    for first in (Mask.causal(), Mask.causal() & Mask.lengths(queries=lengths, keys=lengths)):
        cache = layer.cache(batch=BATCH, length=20)
        assert_stays(layer(place.floats(BATCH, 5, EMBED), mask=first, cache=cache), place)
        for _ in range(2):
            assert_stays(
                layer(place.floats(BATCH, 1, EMBED), mask=Mask.causal(), cache=cache), place
            )
        cache = cache.select(place.integers(2))
        assert_stays(layer(place.floats(2, 1, EMBED), mask=Mask.causal(), cache=cache), place)


DROP_IN: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "bias of keys": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": SOURCE, "vdim": SOURCE + 1},
    "dropout": {"dropout": 0.5},
}


def run_drop_in(place: Place, options: str) -> None:
    """Run torch's layer with each of its masks, with weights and without."""
    layer = MultiheadAttention(EMBED, 5, **DROP_IN[options], device=place.device)
    lead = (BATCH, QUERIES) if layer.batch_first else (QUERIES, BATCH)
    q = place.floats(*lead, EMBED)
    k, v = (place.floats(*lead, width) for width in (layer.kdim, layer.vdim))
    hidden = torch.ones(QUERIES, QUERIES, dtype=torch.bool, device=place.device).triu(1)
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool, device=place.device)
    masks: list[dict[str, Any]] = [
        {},
        {"attn_mask": hidden, "is_causal": True},
        {"key_padding_mask": padding},
        {"attn_mask": hidden.float(), "key_padding_mask": padding.float()},
    ]
    for given in masks:
        for asked in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            assert_stays(layer(q, k, v, **given, **asked), place)


# ---- statistics of a scan ------------------------------------------------------------------------


def statistics_call(place: Place) -> CapturedCall:
    """Make a causal call with all that the statistics need."""
    q, k, v = (place.floats(BATCH, heads, QUERIES, HEAD_DIM) for heads in (HEADS, 2, 2))
    tokens = torch.zeros(BATCH, QUERIES, dtype=torch.int64, device=place.device)
    return CapturedCall.for_self_attention(
        AttentionMatrix(q, k, mask=Mask.causal(), sink=place.floats(HEADS)),
        tokens=tokens,
        separators=tokens > 0,
        specials=tokens > 1,
        values=v,
        outputs=place.floats(BATCH, HEADS, QUERIES, HEAD_DIM),
        out_proj=place.floats(HEADS, HEAD_DIM, EMBED),
        residual=place.floats(BATCH, QUERIES, EMBED),
        unembedding=place.floats(17, EMBED),
    )


def compute_statistics(place: Place) -> None:
    """Compute the statistics of a scan that read no value."""
    call = statistics_call(place)
    chosen = [each for each in catalogue.STANDARD if each.definition.name not in READING]
    for summary in compute_summaries(call, chosen).values():
        assert all(x.device.type == "cpu" for x in summary.values())


# ---- the tests -----------------------------------------------------------------------------------

# Statistics that read values once a call, or once a tile: docs/paths.md names them.
READING = [
    "duplicate_token",
    "induction",
    "copying",
    "output_cosine",
    "cka",
    "total_variation",
    "head_distance",
    "top_keys",
    "map",
]


def _cases() -> Iterator[Any]:
    for option in OPTIONS:
        yield pytest.param(partial(read_matrix, option=option), id=f"matrix, {option}")
    for axis, choice in LAYERS:
        run = partial(run_layer, axis=axis, choice=choice)
        yield pytest.param(run, id=f"layer, {axis}, {choice}")
    yield pytest.param(run_masks, id="layer, masks")
    for options in DROP_IN:
        yield pytest.param(partial(run_drop_in, options=options), id=f"drop-in, {options}")


def _cases_of_inference() -> Iterator[Any]:
    for axis, choice in LAYERS:
        if (axis, choice) != ("source", "another"):
            run = partial(run_cache, axis=axis, choice=choice)
            yield pytest.param(run, id=f"cache, {axis}, {choice}")
    yield pytest.param(compute_statistics, id="statistics")


CASES, OF_INFERENCE = [*_cases()], [*_cases_of_inference()]
COUNT = {"card": 2 * len(CASES) + len(OF_INFERENCE) + 1, "cuda": len(CASES) + len(OF_INFERENCE)}


@pytest.fixture(scope="module")
def card() -> str:
    """Register a device whose tensors have no memory."""
    if not hasattr(torch, "card"):
        backend_registration._setup_privateuseone_for_python_backend("card")
        torch.card.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    return "card"


@pytest.mark.parametrize("run", CASES)
def test_training_on_card(run: Run, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors(monkeypatch, training=True):
        run(Place(card, "cpu", training=True))


@pytest.mark.parametrize("run", [*CASES, *OF_INFERENCE])
def test_inference_on_card(run: Run, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors(monkeypatch, training=False):
        run(Place(card, "cpu", training=False))
        run(Place(card, card, training=False))


def test_what_reads_on_card(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors(monkeypatch, training=False):
        for statistic in catalogue.find_standard_statistics(READING):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                compute_summaries(statistics_call(Place(card, card, training=False)), [statistic])


@pytest.mark.parametrize("run", [*CASES, *OF_INFERENCE])
def test_inference_on_cuda(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors(monkeypatch, training=False):
        run(Place("cuda", "cpu", training=False))
        run(Place("cuda", "cuda", training=False))
