"""Packed rows, prefixes and functions; and what kernels ask of every kind of clause."""

import gc
from dataclasses import replace

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise import AttentionMatrix
from headwise.errors import HeadwiseError, MaskError
from headwise.masks.clause import MatrixPart, MatrixSizes, Span
from headwise.masks.clauses import lower_clauses, rebuild_clauses
from headwise.masks.clauses.chosen import Chosen
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias, cut_score_bias_to_part
from headwise.testing import Budget
from tests.masks.test_mask import LENGTHS, SHAPE, WHOLE, bind, brute, tiles
from tests.strategies import Problem, allowed, problems

CU_SEQLENS, KEY_CU_SEQLENS = torch.tensor([2, 7, 7, 20]), torch.tensor([0, 11, 15, 29])


def segment_of(offsets: Tensor, position: int) -> int:
    """The sequence that a position belongs to, or -1."""
    inside = [s for s in range(3) if offsets[s] <= position < offsets[s + 1]]
    return inside[0] if inside else -1


def test_a_packed_row_is_its_definition() -> None:
    mask, shape = Mask.packed(CU_SEQLENS, KEY_CU_SEQLENS), (1, 6, 24, 29)
    expected = brute(
        lambda b, h, i, j: segment_of(CU_SEQLENS, i) == segment_of(KEY_CU_SEQLENS, j) >= 0, shape
    )
    assert torch.equal(allowed(mask, shape), expected)
    assert Mask.packed(torch.tensor([0, 1, 3])).draw() == "1 0 0\n0 1 1\n0 1 1"
    assert str(mask) == "packed(3)"


def test_a_packed_row_is_divided_without_ids() -> None:
    mask = Mask.packed(CU_SEQLENS, KEY_CU_SEQLENS) & Mask.causal(align="top-left")
    division = bind(
        mask & Mask.lengths(keys=torch.tensor([20])), (1, 6, 24, 29)
    ).rectangles_of_allowed_pairs()
    assert division is not None
    assert [(*r.queries, *r.keys) for r in division.rectangles] == [(2, 7, 0, 11), (7, 20, 15, 20)]
    assert [clause.kind for clause in division.rest.clauses] == ["band"]


@given(tiles())
def test_divided_rectangles_and_their_rest_are_the_mask(
    drawn: tuple[Mask, tuple[int, int, int, int], list[slice]],
) -> None:
    mask, shape, _ = drawn
    bound, whole = bind(mask, shape), allowed(mask, shape)
    division = bound.rectangles_of_allowed_pairs()
    if division is None:
        return
    again = torch.zeros_like(whole)
    for piece in division.rectangles:
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        again[piece.batch, :, rows, columns] = division.rest.cut_to_part(
            piece.as_matrix_part
        ).evaluate_rows(torch.arange(piece.queries.size))[0]
    assert torch.equal(again, whole)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Problem, MatrixPart]:
    """A problem, and some sequences, queries and keys of it; none of an axis may be drawn."""
    p = draw(problems())
    spans = (
        Span(*sorted(draw(st.tuples(*[st.integers(0, size)] * 2))))
        for size in (p.shape[0], *p.shape[2:])
    )
    return p, MatrixPart(*spans)


@given(parts())
def test_a_part_of_a_matrix_has_its_part_of_the_mask_and_of_the_bias(
    drawn: tuple[Problem, MatrixPart],
) -> None:
    p, place = drawn
    sizes = (place.batches.size, p.shape[1], place.queries.size, place.keys.size)
    if 0 in sizes:
        return
    mask, bias = p.mask or Mask(), p.score_bias or ScoreBias()
    part = Mask(bind(mask, p.shape).cut_to_part(place).clauses)  # may be bound again
    part_of_bias = cut_score_bias_to_part(bias, place, MatrixSizes(*p.shape))
    batches, rows, columns = (slice(*span) for span in place)
    v = p.v[batches, :, columns]
    cut = Problem(p.q[batches, :, rows], p.k[batches, :, columns], v, part, part_of_bias)
    assert cut.shape == sizes
    assert torch.equal(cut.dense_bias(), p.dense_bias()[batches, :, rows, columns])


@given(tiles())
def test_an_interval_is_the_run_of_keys_that_a_query_sees(
    drawn: tuple[Mask, tuple[int, int, int, int], list[slice]],
) -> None:
    mask, shape, _ = drawn
    bound, whole = bind(mask, shape), allowed(mask, shape)
    found = bound.key_interval_per_query(torch.arange(shape[2]))
    if found is None:
        rows = torch.arange(shape[2])
        told = [
            clause.key_interval_per_query(rows, slice(None), bound.sizes)
            for clause in bound.clauses
        ]
        assert None in told
        return
    first, stop = (bound_[:, None, :, None] for bound_ in found)
    place = torch.arange(shape[3])
    assert torch.equal(((place >= first) & (place < stop)).expand(shape), whole)


@given(tiles())
def test_a_lifted_clause_is_the_one_that_was_lowered(
    drawn: tuple[Mask, tuple[int, int, int, int], list[slice]],
) -> None:
    mask, shape, _ = drawn
    bound = bind(mask, shape)
    again = replace(bound, clauses=rebuild_clauses(*lower_clauses(bound.clauses)))
    rows = torch.arange(shape[2])
    assert torch.equal(again.evaluate_rows(rows), bound.evaluate_rows(rows))


def test_a_function_is_drawn_and_asked_about_chosen_heads() -> None:
    mask = Mask.where(lambda batch, head, query, key: (key - query) % (head + 1) == 0)
    assert mask.draw(2, 3) == "1 1 1\n1 1 1"
    by_key = Mask.where(lambda batch, head, query, key: key <= 2 * query)
    assert by_key.draw(2, 4) == "1 0 0 0\n1 1 1 0"
    chosen = mask.of_heads(torch.tensor([4, 2, 1])).of_heads(torch.tensor([1, 2]))
    expected = allowed(mask, (1, 6, 24, 29))[:, [2, 1]]
    assert torch.equal(allowed(chosen, (1, 2, 24, 29)), expected)


REFUSED = {
    "a side": (lambda: Mask.lengths(keys=LENGTHS, side="up"), "lengths(side='up')"),  # type: ignore[arg-type]
    "starts": (lambda: Mask.starts(keys=torch.tensor(3)), "starts of shape () for the keys"),
    "offsets": (lambda: Mask.packed(torch.zeros(3)), "cu_seqlens that is a tensor of dtype"),
    "two numbers of sequences": (
        lambda: Mask.packed(torch.tensor([0, 3]), torch.tensor([0, 1, 3])),
        "2 offsets for the queries and 3 for the keys",
    ),
    "offsets that fall": (
        lambda: bind(Mask.packed(torch.tensor([0, 9, 4])), (1, 1, 9, 9)),
        "offsets [0, 9, 4] to 4 for 9 queries",
    ),
    "a batch of packed rows": (lambda: bind(Mask.packed(CU_SEQLENS)), "for a batch of 3"),
    "a prefix below 0": (lambda: Mask.prefix(-1), "prefix(-1)"),
    "one prefix below 0": (lambda: Mask.prefix(torch.tensor([3, -2])), "prefix(-2)"),
    "prefixes of others": (
        lambda: bind(Mask.prefix(torch.tensor([3, 2]), align="top-left")),
        "prefix lengths of shape (2,)",
    ),
    "a prefix without an alignment": (lambda: bind(Mask.prefix(3)), "without an alignment"),
    "a tensor for a function": (lambda: Mask.where(WHOLE), "Mask.where(a torch.bool tensor"),  # type: ignore[arg-type]
    "a function of floats": (
        lambda: allowed(Mask.where(lambda b, h, i, j: 1.0 * (i + j)), SHAPE),
        "that returns a torch.float32 tensor of shape (24, 29)",
    ),
    "a function of other sizes": (
        lambda: allowed(Mask.where(lambda b, h, i, j: torch.ones(5, dtype=torch.bool)), SHAPE),
        "that returns a torch.bool tensor of shape (5,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_clause_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user has it
    make, seen = REFUSED[name]
    with pytest.raises(HeadwiseError) as refused:
        make()
    assert seen in refused.value.saw


# ---- a function in graphs and in the backward pass -----------------------------------------------


class Product(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        mask = Mask.where(lambda batch, head, query, key: key != query)
        return AttentionMatrix(q, k, mask=mask, softcap=3.0) @ k


GRAPHS = {
    "torch.export": torch.export.export,
    "torch.jit.trace": torch.jit.trace,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_refuses_a_function_and_names_the_way_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user has it
    inputs = (torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    with pytest.raises(MaskError, match=r"Mask\.may_attend\("):
        GRAPHS[name](Product(), inputs)


class Windowed(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return AttentionMatrix(q, q, mask=Mask.window(left=3, right=5)) @ q


@pytest.mark.parametrize("made_at", [4, 12])  # of 4 tokens the window hides nothing
def test_one_exported_program_serves_all_lengths_of_a_window_with_two_sides(
    made_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user has it
    sizes = ({2: torch.export.Dim("length", min=2)},)
    program = torch.export.export(
        Windowed(), (torch.randn(1, 2, made_at, 8),), dynamic_shapes=sizes
    ).module()
    for length in (2, 4, 5, 6, 7, 30):
        q = torch.randn(1, 2, length, 8)
        budget = Budget.for_head_outputs(q, q, q, mask=Mask.window(left=3, right=5))
        budget.assert_holds(program(q))


def test_a_function_is_there_in_the_backward_pass_of_a_mask_that_is_gone() -> None:
    q, k = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = Product()(q, k)
    gc.collect()
    hidden = Mask.may_attend(~torch.eye(5, dtype=torch.bool), axes="queries keys")
    expected = AttentionMatrix(q, k, mask=hidden, softcap=3.0) @ k
    for gradient, own in zip(
        torch.autograd.grad(found.sum(), (q, k)),
        torch.autograd.grad(expected.sum(), (q, k)),
        strict=True,
    ):
        assert torch.equal(gradient, own)


# ---- chosen keys -------------------------------------------------------------------------------


def test_chosen_keys_are_the_numbers_that_are_named() -> None:
    """Twice named is once chosen, and -1 names nothing."""
    indices = torch.tensor([[[[3, 0, 3], [-1, 1, -1], [-1, -1, -1]]]])
    mask = Mask((Chosen.from_indices(indices, heads=1, keys=4, size=1),))
    assert mask.draw() == "1 0 0 1\n0 1 0 0\n0 0 0 0"
    assert str(mask) == "chosen(1, 1, 3, 4)"


def test_chosen_blocks_are_their_keys() -> None:
    """Each group of heads chooses its own; the last block is cut at the last key."""
    indices = torch.tensor([[[[1]], [[2]]]], dtype=torch.int32)
    mask = Mask((Chosen.from_indices(indices, heads=4, keys=8, size=3),))
    drawn = [mask.draw(keys=8, head=head) for head in range(4)]
    assert drawn == ["0 0 0 1 1 1 0 0"] * 2 + ["0 0 0 0 0 0 1 1"] * 2
    assert str(mask) == "chosen(1, 2, 1, 3) in blocks of 3"


def chosen(size: int, groups: int) -> tuple[Mask, Tensor]:
    """A choice of blocks, and the same written down by its definition."""
    generator = torch.Generator().manual_seed(5)
    blocks = -(-SHAPE[3] // size)
    indices = torch.randint(-1, blocks, (SHAPE[0], groups, SHAPE[2], 4), generator=generator)
    expected = brute(
        lambda b, h, i, j: j // size in indices[b, h * groups // SHAPE[1], i].tolist(), SHAPE
    )
    return Mask((Chosen.from_indices(indices, heads=SHAPE[1], keys=SHAPE[3], size=size),)), expected


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (4, 1), (4, 2), (1, 2), (4, 6), (40, 2)])
def test_a_choice_in_every_reading(size: int, groups: int) -> None:
    mask, expected = chosen(size, groups)
    bound = bind(mask, SHAPE)
    assert torch.equal(allowed(mask, SHAPE), expected)
    rows, columns = torch.tensor([0, 7, 23, 11]), torch.tensor([28, 3, 14, 0])
    pairs = bound.evaluate_pairs(rows, columns).expand(*SHAPE[:2], 4)
    assert torch.equal(pairs, expected[:, :, rows, columns])
    block = bound.evaluate_block(slice(1, 3), slice(1, 5), torch.tensor([9, 2]), slice(5, 18))
    assert block is not None
    assert torch.equal(block.expand(2, 4, 2, 13), expected[1:3, 1:5, [9, 2], 5:18])
    heads = torch.tensor([4, 1, 0])
    few = SHAPE[0], 3, *SHAPE[2:]
    assert torch.equal(allowed(mask.of_heads(heads), few), expected[:, heads])
    place = MatrixPart(Span(1, 3), Span(4, 9), Span(6, 27))
    part = bound.cut_to_part(place)
    again = part.cut_to_part(MatrixPart(Span(1, 2), Span(1, 4), Span(3, 14)))
    wholes = ((part, expected[1:3, :, 4:9, 6:27]), (again, expected[2:3, :, 5:8, 9:20]))
    for made, wanted in wholes:
        rows = torch.arange(wanted.shape[2])
        assert torch.equal(made.evaluate_rows(rows).expand(wanted.shape), wanted)
    lowered = rebuild_clauses(*lower_clauses(part.clauses))
    assert [(c.size, c.first) for c in lowered if isinstance(c, Chosen)] == [(size, 6 % size)]
    widths = bound.clauses[0].broadcast_shape(bound.sizes)
    assert widths == (SHAPE[0], 1 if groups == 1 else SHAPE[1], *SHAPE[2:])
    # A key that no query chose is no padding.
    assert bool(bound.real_keys().all())


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (4, 2)])
def test_kernels_read_a_choice(size: int, groups: int) -> None:
    mask, written = chosen(size, groups)
    q = torch.randn(SHAPE[0], SHAPE[1], SHAPE[2], 10, dtype=torch.float64)
    k, v = (torch.randn(SHAPE[0], 2, SHAPE[3], width, dtype=torch.float64) for width in (10, 7))
    causal = Mask.causal(align="bottom-right")
    dense = Mask.may_attend(written, axes="batch heads queries keys")
    ours, theirs = (AttentionMatrix(q, k, mask=m & causal) for m in (mask, dense))
    torch.testing.assert_close(ours @ v, theirs @ v)
    torch.testing.assert_close(ours.dense(), theirs.dense())
    torch.testing.assert_close(ours.pool(5, 7), theirs.pool(5, 7))
    torch.testing.assert_close(ours.rows(torch.tensor([3, 19])), theirs.rows(torch.tensor([3, 19])))


def test_a_choice_of_other_sizes_is_refused() -> None:
    mask, _ = chosen(4, 2)
    with pytest.raises(MaskError, match="chosen keys"):
        bind(mask, (*SHAPE[:3], SHAPE[3] + 9))
    with pytest.raises(MaskError, match="chosen keys"):
        bind(mask, (SHAPE[0], SHAPE[1], SHAPE[2] + 1, SHAPE[3]))
