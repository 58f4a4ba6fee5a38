"""Forms of packing: where a number goes, in closed form, and that the map finds it again."""

import pytest
import torch

from headwise.study.questions.packing import packing_forms

HEADS, EMBED, HEAD_DIM = 3, 7, 2
SMALL = torch.arange(3 * HEADS * EMBED * HEAD_DIM).view(3 * HEADS, EMBED, HEAD_DIM)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("per_head", [(7, 2)] * 9),
        ("separate", [(6, 7)] * 3),
        ("q_kv", [(6, 7), (12, 7)]),
        ("packed", [(18, 7)]),
        ("transposed", [(7, 18)]),
    ],
)
def test_shapes(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert [tuple(m.shape) for m in packing_forms(HEADS)[name].pack(SMALL)] == shapes


def test_where_one_number_goes() -> None:
    """Values of the last head: matrix 2 * 3 + 2; input 5, channel 1."""
    number = SMALL[8, 5, 1]
    packed = {name: form.pack(SMALL) for name, form in packing_forms(HEADS).items()}
    assert packed["per_head"][8][5, 1] == number
    assert packed["separate"][2][2 * 2 + 1, 5] == number
    assert packed["q_kv"][1][6 + 2 * 2 + 1, 5] == number
    assert packed["packed"][0][12 + 2 * 2 + 1, 5] == number
    assert packed["transposed"][0][5, 12 + 2 * 2 + 1] == number


@pytest.mark.parametrize("name", packing_forms(HEADS))
def test_the_index_map_says_where(name: str) -> None:
    form = packing_forms(HEADS)[name]
    flat = torch.cat([matrix.flatten() for matrix in form.pack(SMALL)])
    places = form.stored_positions(embed_dim=EMBED, head_dim=HEAD_DIM)
    assert torch.equal(flat[places], SMALL)
    assert torch.equal(places.flatten().sort()[0], torch.arange(SMALL.numel()))


@pytest.mark.parametrize("name", packing_forms(HEADS))
def test_products_are_those_of_the_small_matrices(name: str) -> None:
    form, small = packing_forms(HEADS)[name], SMALL.double() / 100
    bias = torch.arange(3 * HEADS * HEAD_DIM).double()
    x, source = (torch.randn(2, length, EMBED, dtype=torch.float64) for length in (4, 4))
    source = x if len(form.sizes) == 1 else source
    found = form.split_outputs_into_heads(
        form.project(x, source, form.pack(small), form.biases_of_stored_matrices(bias))
    )
    for part, (heads, tokens) in enumerate(zip(found, (x, source, source), strict=True)):
        for head in range(HEADS):
            count = part * HEADS + head
            exact = tokens @ small[count] + bias[2 * count : 2 * count + 2]
            torch.testing.assert_close(heads[:, head], exact)
