"""The mask function: lazy where it can be, and everywhere the mask that transformers describes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from transformers.masking_utils import and_masks, or_masks, sdpa_mask

from headwise.huggingface import masks
from headwise.huggingface.masks import LazyMask, make_transformers_mask
from headwise.masks.clauses.dense import Dense
from headwise.masks.clauses.segments import Segments
from tests.huggingface.models import BATCH, LENGTH, lengths_mask

LONGEST = 32  # of a static cache

# (queries, keys, first query, first key)
PLACES = {
    "no cache": (LENGTH, LENGTH, 0, 0),
    "dynamic cache": (LENGTH, LENGTH + 7, 7, 0),
    "one query": (1, LENGTH, LENGTH - 1, 0),
    "static cache, empty": (LENGTH, LONGEST, 0, 0),
    "static cache, filled": (5, LONGEST, 9, 0),
    "sliding cache": (6, 10, 15, 11),
    "sliding cache, one query": (1, 5, 15, 11),
}
PADDING = {
    "none": lambda length: None,
    "all real": lambda length: torch.ones(BATCH, length, dtype=torch.bool),
    "right": lambda length: lengths_mask([length, 7, 1], length, side="right").bool(),
    "left": lambda length: lengths_mask([length, 7, 1], length, side="left").bool(),
    "holes": lambda length: torch.arange(length).expand(BATCH, -1) % 3 > 0,
    "longer": lambda length: lengths_mask([length, 7, 1], length + 3, side="right").bool(),
    "shorter": lambda length: torch.ones(BATCH, max(1, length - 2), dtype=torch.bool),
    "nothing real": lambda length: torch.zeros(BATCH, length, dtype=torch.bool),
}
IDS = torch.tensor([[0] * 5 + [1] * 8, [0] * 12 + [1], [0] * 13])
POSITIONS = torch.tensor([[*range(5), *range(3, 11)], [*range(12), 0], [*range(2, 15)]])
START = torch.tensor([0, 6, 12])


def packed(inner: Any) -> Any:
    return masking_utils.packed_sequence_compatibility_function(inner, POSITIONS, IDS)


KINDS = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(5, START),
}
PACKED = {
    name: packed(KINDS[name]) for name in ("causal", "window", "both sides", "everything", "chunks")
}


def call(place: tuple[int, ...], function: Any, padding: Tensor | None, **more: Any) -> Any:
    queries, keys, first_query, first_key = place
    return {
        "batch_size": BATCH,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": function,
        "attention_mask": padding,
        "device": torch.device("cpu"),
        **more,
    }


def described(options: Any) -> Tensor:
    """The mask as transformers writes it."""
    always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**{**options, **always})
    assert mask is not None
    return mask.expand(BATCH, 1, options["q_length"], options["kv_length"])


def check_lazy(options: Any) -> LazyMask:
    mask = make_transformers_mask(**options)
    assert isinstance(mask, LazyMask)
    assert mask.shape == (BATCH, 1, options["q_length"], options["kv_length"])
    assert all(c.allowed.shape[2] == 1 for c in mask.mask.clauses_of_kind(Dense)), "queries x keys"
    assert torch.equal(mask.materialise(), described(options))
    return mask


def check_written(options: Any) -> None:
    mask = make_transformers_mask(**options)
    assert type(mask) is Tensor
    assert torch.equal(mask, described(options))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_lazy_in_every_place(kind: str, place: str, padding: str) -> None:
    _, keys, _, first_key = PLACES[place]
    check_lazy(call(PLACES[place], KINDS[kind], PADDING[padding](first_key + keys)))


def test_keys_ahead_of_the_queries_are_written() -> None:
    # No band of a Mask stands apart from the first key and from the last.
    for kind in ("causal", "window", "chunks"):
        check_written(call((4, 6, 2, 3), KINDS[kind], None))


@pytest.mark.parametrize("kind", PACKED)
def test_packed_sequences(kind: str) -> None:
    mask = check_lazy(call(PLACES["no cache"], PACKED[kind], None)).mask
    assert mask.clauses_of_kind(Segments)
    assert not mask.clauses_of_kind(Dense)
    # Positions of a row that is not whole are none of ours to guess.
    check_written(call((LENGTH - 1, LENGTH, 0, 0), PACKED[kind], None))


def test_padding_in_the_cheapest_words() -> None:
    def read(place: str, padding: Tensor) -> str:
        return str(check_lazy(call(PLACES[place], KINDS["causal"], padding)).mask)

    assert read("no cache", PADDING["all real"](LENGTH)) == "causal top-left"
    assert read("no cache", PADDING["right"](LENGTH)) == "causal top-left & lengths(keys)"
    assert read("no cache", PADDING["left"](LENGTH)) == "causal top-left & starts(keys)"
    # The rest of a static cache is hidden by causality.
    rest = lengths_mask([LENGTH] * BATCH, LONGEST, side="right").bool()
    assert read("static cache, empty", rest) == "causal top-left"


def test_a_bidirectional_mask_that_hides_nothing_is_none_where_allowed() -> None:
    allowed = {"allow_is_bidirectional_skip": True}
    for padding in ("none", "all real"):
        given = PADDING[padding](LENGTH)
        assert (
            make_transformers_mask(**call(PLACES["no cache"], KINDS["everything"], given))
            is not None
        )
        options = call(PLACES["no cache"], KINDS["everything"], given, **allowed)
        assert make_transformers_mask(**options) is None
        assert sdpa_mask(**options) is None
    for name, padding in (("everything", "right"), ("both sides", "none"), ("causal", "none")):
        check_lazy(call(PLACES["no cache"], KINDS[name], PADDING[padding](LENGTH), **allowed))
    wide = masking_utils.sliding_window_bidirectional_mask_function(LENGTH - 1)
    assert make_transformers_mask(**call(PLACES["no cache"], wide, None, **allowed)) is None


def test_a_causal_mask_is_never_none() -> None:
    check_lazy(call(PLACES["no cache"], KINDS["causal"], None, allow_is_causal_skip=True))
    # Nor where it is written, and transformers would leave it out.
    options = call(
        PLACES["no cache"], KINDS["causal"], None, allow_is_causal_skip=True, use_vmap=True
    )
    assert sdpa_mask(**options) is None
    check_written(options)


def _prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 3


WRITTEN = {
    "or": or_masks(masking_utils.causal_mask_function, _prefix),
    "a function of the model": and_masks(masking_utils.causal_mask_function, _prefix),
    "blocks": or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(IDS)),
    "remapped alone": masking_utils.remap_positions_for_packed_sequence(_prefix, POSITIONS),
    "packed, of the model": packed(_prefix),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_not_recognised_is_written(kind: str) -> None:
    check_written(call(PLACES["no cache"], WRITTEN[kind], PADDING["left"](LENGTH)))


def test_a_function_for_vmap_is_written() -> None:
    check_written(call(PLACES["no cache"], KINDS["causal"], None, use_vmap=True))


def test_a_static_cache_counts_in_a_tensor() -> None:
    first = torch.tensor(9)
    check_lazy({**call(PLACES["static cache, filled"], KINDS["causal"], None), "q_offset": first})
    # A decoding step may be compiled, and takes its mask as an input.
    check_written({**call((1, LONGEST, 9, 0), KINDS["causal"], None), "q_offset": first})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_where_python_does_not_run_at_every_call_it_is_written() -> None:
    options = call(PLACES["no cache"], KINDS["window"], PADDING["left"](LENGTH))
    expected = described(options)

    def made(padding: Tensor) -> Tensor:
        mask = make_transformers_mask(**{**options, "attention_mask": padding})
        assert mask is not None
        assert not isinstance(mask, LazyMask)
        return mask.clone()

    padding = options["attention_mask"]
    assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(padding), expected)
    assert torch.equal(torch.jit.trace(made, (padding,), check_trace=False)(padding), expected)
    assert torch.equal(torch.func.vmap(made)(padding[None])[0], expected)
    with FakeTensorMode() as mode:
        assert made(mode.from_tensor(padding)).shape == expected.shape
    meta = {**options, "device": torch.device("meta"), "attention_mask": None}
    assert not isinstance(make_transformers_mask(**meta), LazyMask)


# ---- only what means what we think it means is recognised --------------------------------------


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    masks.select_trusted_readers.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_all_of_this_version_are_known() -> None:
    masks.select_trusted_readers.cache_clear()
    assert len(masks.select_trusted_readers()) == len(masks._KINDS)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("change", ["another meaning", "another signature", "gone"])
def test_another_version_is_not_trusted(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(sliding_window: int) -> Any:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    def with_two(sliding_window: int, side: str) -> Any:
        return another(sliding_window)

    if change == "gone":
        monkeypatch.delattr(masking_utils, "sliding_window_overlay")
    else:
        new = another if change == "another meaning" else with_two
        monkeypatch.setattr(masking_utils, "sliding_window_overlay", new)
    masks.select_trusted_readers.cache_clear()
    assert len(masks.select_trusted_readers()) == len(masks._KINDS) - 1
    check_written(call(PLACES["no cache"], and_masks(another(4), KINDS["causal"]), None))
    check_lazy(call(PLACES["no cache"], KINDS["causal"], None))
