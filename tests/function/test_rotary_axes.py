"""Rotations by several positions of a token: sections, their orders, and calls with positions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function import axes_of_sections
from headwise.layers.norm import QKNorm

BATCH, HEADS, LENGTH, EMBED, KV_HEADS = 3, 6, 24, 40, 2


def letters(*args: Any, **options: Any) -> str:
    return "".join("THW"[axis] for axis in axes_of_sections(*args, **options))


def test_orders_of_sections() -> None:
    assert letters((2, 3, 3)) == "TTHHHWWW"
    assert letters((4, 2, 2), order="in turn") == "THWTHWTT"
    assert letters((3, 3, 2), order="rows first") == "HWHWHWTT"


@pytest.mark.parametrize("sections", [(), (0, 0), (2, -1), (1.5, 2)])
def test_sections_are_whole_numbers(sections: tuple[Any, ...]) -> None:
    with pytest.raises(OptionError, match="whole numbers, and"):
        axes_of_sections(sections)


def test_sections_that_do_not_add_up() -> None:
    rotary = Rotary(axes=axes_of_sections((2, 3, 2)))
    with pytest.raises(OptionError, match=r"7 pairs, in sections of 2, 3, 2, and a rotary width"):
        Attention(EMBED, HEADS, head_dim=16, rotary=rotary)


def tokens(width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, HEADS, LENGTH, width, generator=generator, dtype=torch.float64)


def places(axes: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(30, (axes, BATCH, LENGTH), generator=generator)


@pytest.mark.parametrize("pairing", ["half-split", "interleaved"])
@pytest.mark.parametrize("order", ["blocks", "in turn", "rows first"])
def test_each_pair_turns_by_its_axis(pairing: Any, order: Any) -> None:
    """Each pair is that of a rotation by one position, the one of its axis."""
    axes = axes_of_sections((3, 3, 2), order=order)
    rotary, plain = (Rotary(500.0, 16, pairing, axes=each) for each in (axes, None))
    x, positions = tokens(18), places(3)
    turned = rotary.rotate(x, positions)
    for pair, axis in enumerate(axes):
        channels = (pair, pair + 8) if pairing == "half-split" else (2 * pair, 2 * pair + 1)
        alone = plain.rotate(x, positions[axis])
        assert torch.equal(turned[..., channels], alone[..., channels])
    assert torch.equal(turned[..., 16:], x[..., 16:])


def test_one_position_in_all_axes_is_the_usual_rotation() -> None:
    rotary, x = Rotary(axes=axes_of_sections((3, 3, 2))), tokens()
    positions = torch.arange(LENGTH)
    usual = Rotary().rotate(x, positions)
    assert torch.equal(rotary.rotate(x, positions), usual)
    assert torch.equal(rotary.rotate(x, positions.expand(3, BATCH, -1)), usual)


@pytest.mark.parametrize("shape", [(2, BATCH, LENGTH), (3, BATCH + 1, LENGTH)])
def test_positions_of_another_shape(shape: tuple[int, ...]) -> None:
    rotary = Rotary(axes=axes_of_sections((3, 3, 2)))
    needed = r"\(axes 3, batch 3, length 24\), for 3 x 24 tokens"
    with pytest.raises(ShapeError, match=needed):
        rotary.rotate(tokens(), torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"or \(batch 3, length 24\), for"):
        Rotary().rotate(tokens(), torch.zeros(shape, dtype=torch.long))


def test_coordinates_may_be_floats_with_axes_alone() -> None:
    with pytest.raises(DTypeError, match="whole numbers"):
        Rotary().rotate(tokens(), torch.rand(BATCH, LENGTH))
    Rotary(axes=axes_of_sections((4, 4))).rotate(tokens(), torch.rand(2, BATCH, LENGTH))


# ---- calls of a layer --------------------------------------------------------------------------


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    options = {"head_dim": 16, "num_kv_heads": KV_HEADS, "rotary": Rotary(500.0)} | options
    return Attention(EMBED, HEADS, **options, dtype=torch.float64).requires_grad_(False)


SECTIONS = Rotary(500.0, axes=axes_of_sections((3, 3, 2)))


def inputs(length: int = LENGTH, width: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)


def test_positions_of_a_call_are_those_of_its_rotation() -> None:
    made, x = layer(rotary=SECTIONS), inputs()
    q, k = (
        SECTIONS.rotate(each.unflatten(-1, (-1, 16)).transpose(1, 2), places(3))
        for each in (made.q_proj(x), made.k_proj(x))
    )
    matrix = made.matrix(x, positions=places(3))
    assert torch.equal(matrix.q, q)
    assert torch.equal(matrix.k, k)
    outputs = made.head_outputs(x, positions=places(3), mask=Mask.causal())
    stages = made.stages(x, positions=places(3), mask=Mask.causal())
    assert torch.equal(stages["head outputs"], outputs)
    assert torch.equal(stages["output"], made(x, positions=places(3), mask=Mask.causal()))
    parts = made.contributions(x, positions=places(3), mask=Mask.causal()).sum(1)
    torch.testing.assert_close(parts + made.out_proj.bias, stages["output"], rtol=1e-12, atol=0)
    assert "tokens" in str(made.explain(x, positions=places(3)))


@pytest.mark.parametrize("rotary", [Rotary(500.0), SECTIONS], ids=["one axis", "three axes"])
def test_positions_that_count_are_no_positions(rotary: Rotary) -> None:
    made, x = layer(rotary=rotary), inputs()
    usual = made(x, mask=Mask.causal())
    for positions in (torch.arange(LENGTH), torch.arange(LENGTH).expand(BATCH, -1)):
        assert torch.equal(made(x, mask=Mask.causal(), positions=positions), usual)


def test_a_norm_after_the_rotation_makes_positions_absolute() -> None:
    made, x = layer(qk_norm=QKNorm(place="after")), inputs()
    with torch.no_grad():
        made.q_norm.weight.add_(torch.linspace(0, 1, 16))
    apart = made(x, positions=torch.arange(LENGTH) + 50) - made(x)
    assert apart.abs().max() > 1e-3


def test_steps_with_a_cache_and_positions_are_one_pass() -> None:
    made, x, positions = layer(rotary=SECTIONS), inputs(), places(3)
    whole = made(x, mask=Mask.causal(), positions=positions)
    cache = made.cache(batch=BATCH, length=LENGTH)
    steps = [
        made(x[:, part], mask=Mask.causal(), positions=positions[..., part], cache=cache)
        for part in (slice(0, 11), slice(11, 12), slice(12, LENGTH))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-12, atol=1e-14)
    with pytest.raises(OptionError, match="a cache of 24 tokens that came with positions"):
        made(x[:, :1], cache=cache)
    chosen = cache.select(torch.tensor([2, 0]))
    with pytest.raises(OptionError, match=r"24 tokens that came with positions=\.\.\."):
        made(x[:2, :1], cache=chosen)
    cache.clear()
    made(x, cache=cache)
    with pytest.raises(OptionError, match="that came without positions"):
        made(x[:, :1], cache=cache, positions=positions[..., :1])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_positions_stay_with_their_tokens_beside_padding(side: Any, is_cached: bool) -> None:
    """Also where real tokens are packed into one row, or move in a cache."""
    width, length = 256, 96
    made = Attention(width, 8, rotary=SECTIONS_OF_32, dtype=torch.float64).requires_grad_(False)
    x, lengths = inputs(length, width), torch.tensor([96, 3, 17])
    positions = torch.randint(30, (3, BATCH, length), generator=torch.Generator().manual_seed(5))
    mask = Mask.lengths(queries=lengths, keys=lengths, side=side) & Mask.causal()
    if not is_cached:
        assert "padding is skipped" in str(made.explain(x, mask=mask, positions=positions))
    cache = made.cache(batch=BATCH, length=length) if is_cached else None
    found = made(x, mask=mask, positions=positions, cache=cache)
    for row, n in enumerate(lengths.tolist()):
        real = slice(length - n, length) if side == "left" else slice(0, n)
        given = positions[:, row : row + 1, real]
        alone = made(x[row : row + 1, real], mask=Mask.causal(), positions=given)
        torch.testing.assert_close(found[row : row + 1, real], alone, rtol=1e-9, atol=1e-12)


SECTIONS_OF_32 = Rotary(500.0, axes=axes_of_sections((6, 6, 4)))


def test_a_layer_without_rotary_has_no_place_for_positions() -> None:
    with pytest.raises(OptionError, match="positions= for a layer without rotary"):
        layer(rotary=None)(inputs(), positions=torch.arange(LENGTH))


def test_the_description_has_what_a_rotary_has() -> None:
    rotary = Rotary(
        500.0, 12, exponent_width=16, span=7, attention_factor=1.25, q_offset=1.0, k_offset=2.0
    )
    spec = layer(rotary=rotary).spec
    assert Rotary.of(spec.rotation) == rotary
    assert "span=7" in repr(rotary)
    assert "q_offset" not in repr(SECTIONS)


def test_a_span_and_offsets_turn_as_the_rule_says() -> None:
    rotary = Rotary(500.0, 6, span=8, attention_factor=1.5, q_offset=1.0, k_offset=-2.0)
    q, k = rotary.rotate_both(tokens(), tokens()[:, :2], torch.arange(LENGTH))
    plain = Rotary(500.0, 6)
    for x, offset in ((q, 1.0), (k, -2.0)):
        paired = tokens()[:, : x.shape[1]][..., [0, 1, 2, 8, 9, 10]]
        angles = (torch.arange(LENGTH) + offset)[:, None] * plain.frequencies(6).double()
        first, second = paired.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin()
        torch.testing.assert_close(x[..., :3], 1.5 * turned, rtol=1e-6, atol=1e-7)
        assert torch.equal(x[..., 3:8], tokens()[:, : x.shape[1]][..., 3:8])


# ---- rows and columns --------------------------------------------------------------------------


def turned_by(rotary: Rotary, axis: int) -> list[float]:
    """The angle of each channel at place 1 of one axis, from what it does to two vectors."""
    positions = torch.zeros(2, 1, 1, dtype=torch.long)
    positions[axis] = 1
    eye = torch.eye(16, dtype=torch.float64)[:, None, None]
    cos = rotary.rotate(eye, positions.expand(2, 16, 1))[:, 0, 0].diagonal()
    return [round(float(x), 5) for x in cos.clamp(-1, 1).acos()]


@pytest.mark.parametrize(
    ("order", "rows", "columns"),
    [
        ("halves", [1, 0.1, 0.01, 0.001, 0, 0, 0, 0] * 2, [0, 0, 0, 0, 1, 0.1, 0.01, 0.001] * 2),
        (
            "alternating",
            [1, 0.1, 0.01, 0.001, 0, 0, 0, 0] * 2,
            [0, 0, 0, 0, 0.31623, 0.03162, 0.00316, 0.00032] * 2,
        ),
        (
            "parts",
            [*[1, 0.1, 0.01, 0.001] * 2, *[0] * 8],
            [*[0] * 8, *[1, 0.1, 0.01, 0.001] * 2],
        ),
    ],
)
def test_rows_and_columns_turn_their_channels(
    order: Any, rows: list[float], columns: list[float]
) -> None:
    rotary = Rotary.of_plane(10_000.0, 16, order=order)
    for axis, expected in enumerate((rows, columns)):
        found = turned_by(rotary, axis)
        assert found == pytest.approx(expected, abs=2e-5)
    x, positions = tokens(), torch.rand(2, BATCH, LENGTH) * 6.28
    sizes = rotary.rotate(x, positions).norm(dim=-1)
    torch.testing.assert_close(sizes, x.norm(dim=-1), rtol=1e-6, atol=0)
    still = positions.clone()
    still[:, :, :5] = 0
    assert torch.equal(rotary.rotate(x, still)[:, :, :5], x[:, :, :5])


def test_pairs_of_a_part_lie_within_it() -> None:
    rotary, x = Rotary.of_plane(10_000.0, 16, order="parts"), tokens()
    positions = places(2)
    halves = [
        Rotary(10_000.0, 8).rotate(half, positions[axis])
        for axis, half in enumerate(x.chunk(2, -1))
    ]
    torch.testing.assert_close(rotary.rotate(x, positions), torch.cat(halves, -1))


@pytest.mark.parametrize("options", [{"head_dim": 18}, {"head_dim": 16, "order": "rows"}])
def test_a_plane_that_does_not_fit(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"Rotary.of_plane\(head_dim="):
        Rotary.of_plane(100.0, **options)
    with pytest.raises(OptionError, match=r"numbers=.0, 9. and parts=1"):
        Rotary(width=4, numbers=(0, 9)).frequencies(4)
