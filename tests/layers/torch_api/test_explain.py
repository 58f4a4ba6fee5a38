"""What ``explain`` of the drop-in says, beside what the layer does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import HeadwiseError, MultiheadAttention
from headwise.errors import OptionError
from headwise.matrix.kernels import sdpa

BATCH, QUERIES, KEYS, EMBED, HEADS = 3, 24, 29, 40, 5
PADDING = torch.arange(KEYS) >= torch.tensor([KEYS, 7, 20])[:, None]


def layer(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(EMBED, HEADS, batch_first=True, **options).eval()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, key, value = (torch.randn(BATCH, n, EMBED) for n in (QUERIES, KEYS, KEYS))
    return x, key, value


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"need_weights": False}, ("not returned", "not returned")),
        ({"average_attn_weights": False}, ("all heads", "all heads")),
        ({}, ("in a second pass", "in one tiled pass")),
    ],
    ids=["none", "of each head", "mean"],
)
def test_weights_and_the_kernel_that_runs(
    options: dict[str, bool],
    words: tuple[str, str],
    grad: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, runs = layer(), []
    fused = sdpa.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        runs.append(args)
        return fused(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    given = (*inputs(), PADDING)
    with torch.set_grad_enabled(grad):
        told = ours.explain(*given, **options)
        assert runs == []
        ours(*given, **options)
    assert told.weights is not None
    assert words[0 if grad else 1] in told.weights
    assert len(runs) == ("in one tiled pass" not in told.weights)
    assert f"weights: {told.weights}" in str(told)
    assert told.matrix.lines[0].kernel == "sdpa"


def test_products_of_the_input_projection() -> None:
    x, key, value = inputs()
    ours, separate = layer(), layer(kdim=EMBED, vdim=7)

    def names(told: Any) -> list[str]:
        return [" ".join(line.split()[:-5]) for line in told.projections]

    out = "out_proj NonDynamicallyQuantizableLinear"
    cases = {
        ("in_proj q, k, v product",): ours.explain(x, x, x),
        ("in_proj q product", "in_proj k, v product"): ours.explain(x, key, key),
        ("in_proj q product", "in_proj k product", "in_proj v product"): ours.explain(
            x, key, value
        ),
        tuple(f"{n}_proj_weight product" for n in "qkv"): separate.explain(x, key, value[..., :7]),
    }
    for expected, told in cases.items():
        assert names(told)[:-1] == list(expected)
        assert " ".join(told.projections[-1].split()).startswith(out)
    assert told.projections[2].split()[-3:] == ["7", "to", "40"]
    assert "0.00023 GFLOP" in cases["in_proj q, k, v product",].projections[1]  # 2 * 72 * 40 * 40


def test_tokens_order_and_training() -> None:
    x, key, _ = inputs()
    assert layer().explain(x, key, key).tokens == "72, all of the input"
    assert "hides keys" in layer().explain(x, key, key, PADDING).tokens
    ours = layer(dropout=0.5).train()
    told = ours.explain(x, key, key)
    assert "dropout in training" in told.tokens
    assert told.weights is not None
    assert "in a second pass" in told.weights
    unbatched = layer().explain(x[0], x[0], x[0])
    assert unbatched.tokens == "24, all of the input"
    ours.batch_first = False
    first = ours.explain(*(t.transpose(0, 1) for t in (x, key, key)))
    assert str(first.matrix) == str(told.matrix)
    slots = MultiheadAttention(EMBED, HEADS, add_bias_kv=True, batch_first=True)
    assert slots.explain(x, key, key).matrix.lines[0].operations == 2 * 2 * 3 * 24 * 30 * 40


def test_it_refuses_what_forward_refuses() -> None:
    x, key, value = inputs()
    ours = layer()
    for args in ((x, key[:2], value), (x, key, value, PADDING[:2]), (x, key[..., :7], value)):
        with pytest.raises(HeadwiseError) as own:
            ours.explain(*args)
        with pytest.raises(HeadwiseError) as forward:
            ours(*args)
        assert str(own.value) == str(forward.value)
    nested = torch.nested.nested_tensor([x[0], x[1, :7]], layout=torch.jagged)
    with pytest.raises(OptionError, match="nested"):
        ours.explain(nested, nested, nested)
