"""What an error of a layer tells to do, done."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, MultiheadAttention, convert, detect, verify
from headwise.checkpoints import load_attention
from headwise.errors import ArgumentError, HeadwiseError

X = torch.randn(3, 7, 24)
STATE = nn.MultiheadAttention(24, 4).state_dict()
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "native": Attention,
    "drop-in": lambda *sizes, **options: MultiheadAttention(*sizes, batch_first=True, **options),
}


def call(layer: nn.Module, x: Any, **options: Any) -> Tensor:
    return layer(x, **options) if isinstance(layer, Attention) else layer(x, x, x, **options)[0]


def advice(run: Callable[[], object]) -> str:
    with pytest.raises(HeadwiseError) as error:
        run()
    return str(error.value).splitlines()[2].removeprefix("  do:     ")


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_on_meta_are_emptied_and_loaded(kind: str) -> None:
    whole, layer = LAYERS[kind](24, 4), LAYERS[kind](24, 4, device="meta")
    code, _, then = advice(lambda: call(layer, X)).partition(", then ")
    assert code == 'layer.to_empty(device="cpu")'
    assert then.startswith("layer.load_state_dict(...)")
    eval(code, {"layer": layer})
    layer.load_state_dict(whole.state_dict())
    assert torch.equal(call(layer, X), call(whole, X))
    assert "make" in advice(lambda: call(whole, X.to("meta")))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_arrays_are_made_tensors(kind: str) -> None:
    layer, x = LAYERS[kind](24, 4), X.numpy()
    name = "x" if kind == "native" else "query"
    code = advice(lambda: call(layer, x)).removeprefix("e.g. ").removeprefix("x=")
    assert torch.equal(call(layer, eval(code, {"torch": torch, name: x})), call(layer, X))


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_array_as_a_mask_of_the_drop_in() -> None:
    layer, mask = LAYERS["drop-in"](24, 4), np.triu(np.ones((7, 7), dtype=bool), 1)
    code = advice(lambda: call(layer, X, attn_mask=mask))
    given = eval(f"dict({code})", {"torch": torch, "attn_mask": mask})
    assert torch.equal(call(layer, X, **given), call(layer, X, attn_mask=torch.as_tensor(mask)))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("heads", [5, 7, 9, 25])
def test_the_nearest_numbers_of_heads_divide(kind: str, heads: int) -> None:
    text = advice(lambda: LAYERS[kind](24, heads))
    numbers = re.search(r"num_heads=(\d+)(?: or (\d+))?", text)
    assert numbers is not None
    named = [int(n) for n in numbers.groups() if n]
    divisors = [n for n in range(1, 25) if 24 % n == 0]
    nearest = [max(n for n in divisors if n < heads), *[n for n in divisors if n > heads][:1]]
    assert named == nearest


@pytest.mark.parametrize(
    "run",
    [
        lambda: convert(STATE, "torch-packed", "canonical", heads=5),
        lambda: Attention.from_layout(STATE, layout="torch-packed", num_heads=5),
    ],
)
def test_counts_that_no_shape_fits(run: Callable[[], object]) -> None:
    with pytest.raises(HeadwiseError, match="needed: a whole number of head_dim; heads 4 or 6 fit"):
        run()


@pytest.mark.parametrize(
    ("run", "mend"),
    [
        (lambda: MultiheadAttention(24, heads=4), "num_heads=4"),  # type: ignore[call-arg]
        (lambda: MultiheadAttention(24, nhead=4), "num_heads=4"),  # type: ignore[call-arg]
        (lambda: Attention.from_layout(STATE, layout="torch-packed", heads=4), "num_heads=4"),
        (lambda: detect(STATE, num_heads=4), "heads=4"),  # type: ignore[call-arg]
        (lambda: verify(STATE, STATE, num_heads=4), "heads=4"),  # type: ignore[call-arg]
        (lambda: load_attention("nowhere", num_kv_heads=2), "kv_heads=2"),
    ],
)
def test_one_count_has_two_names(run: Callable[[], object], mend: str) -> None:
    with pytest.raises(ArgumentError) as error:
        run()
    assert str(error.value).endswith(f"do:     {mend}")


@pytest.mark.parametrize("prefix", ["", "blocks.1.attn."])
def test_torchs_names_in_a_native_layer(prefix: str) -> None:
    theirs = nn.MultiheadAttention(24, 4, batch_first=True)
    state = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    ours: nn.Module = Attention(24, 4)
    for part in reversed(prefix.split(".")[:-1]):
        ours = nn.ModuleDict({part: ours})
    with pytest.raises(RuntimeError) as error:
        ours.load_state_dict(state)
    code = str(error.value).split("another layout: headwise.")[1].strip()
    layer = eval(code, {"Attention": Attention, "state": state})
    torch.testing.assert_close(layer(X), theirs(X, X, X)[0])


def test_names_of_another_layout_lead_to_detect() -> None:
    state = {"c_attn.weight": torch.randn(24, 72), "c_attn.bias": torch.randn(72)}
    state |= {"c_proj.weight": torch.randn(24, 24), "c_proj.bias": torch.randn(24)}
    with pytest.raises(RuntimeError, match=r"headwise.detect\(state\) names it"):
        Attention(24, 4).load_state_dict(state)
    assert "gpt2" in str(detect(state, heads=4))
    part = {name: x for name, x in Attention(24, 4).state_dict().items() if "bias" not in name}
    with pytest.raises(RuntimeError) as error:
        Attention(24, 4).load_state_dict(part)
    assert "another layout" not in str(error.value)  # tensors that are missing alone


def test_native_names_in_the_layer_of_torch() -> None:
    ours, theirs = Attention(24, 4), MultiheadAttention(24, 4, batch_first=True)
    with pytest.raises(RuntimeError) as error:
        theirs.load_state_dict(ours.state_dict())
    code = str(error.value).split("another layout: headwise.")[1].partition(";")[0]
    names = {"convert": convert, "state": ours.state_dict(), "LAYOUT": "headwise"}
    theirs.load_state_dict(eval(code, names))
    torch.testing.assert_close(theirs(X, X, X)[0], ours(X))
    with pytest.raises(RuntimeError) as error:
        theirs.load_state_dict({"in_proj_weight": theirs.in_proj_weight})
    assert "another layout" not in str(error.value)  # tensors that are missing alone
