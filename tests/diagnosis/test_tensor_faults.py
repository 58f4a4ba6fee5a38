"""Each fault of a single canonical tensor, as `verify`, two layers and a function show it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, compare, verify
from headwise.function.weights import AXES, State
from headwise.layers.conversion import canonical_state, layer_state_dict_from_canonical
from headwise.layers.distance import DebertaBias
from headwise.layers.norm import QKNorm
from headwise.layouts import registry

SIZES: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "head_dim": 8}
PLAIN: dict[str, Any] = {}
PER_HEAD, WIDE = QKNorm("layer"), QKNorm(over="width")
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"), PLAIN),
    **{key: {"output_gate": "channel"} for key in ("wg", "bg")},
    "sink": {"sink": True},
    **{key: {"qk_norm": PER_HEAD} for key in ("q_norm", "k_norm", "q_norm_bias", "k_norm_bias")},
    **{key: {"qk_norm": WIDE} for key in ("q_norms", "k_norms")},
    **{key: {"score_bias": DebertaBias(6)} for key in ("wpq", "wpk", "bpq", "bpk")},
}
EXTRA = ("extra_k", "extra_v")  # which only files of torch's layer have
ALONE = (*EXTRA, "wpq", "wpk", "bpq", "bpk")  # tried as weights alone: a search takes long
BIASES = {"q": "q_bias", "k": "k_bias", "v": "v_bias", "o": "out_bias", "g": "gate_bias"}


def swap_heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def transpose(x: Tensor) -> Tensor:
    return x.flatten(0, 1).T.reshape(x.shape)


def reverse(name: str, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1) if len(AXES[name]) > 1 else x
    return rows.flip(0).view_as(x)


CHANGES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "interleaved": lambda _, x: swap_heads(x),
    "transposed": lambda _, x: transpose(x),
    "negated": lambda _, x: -x,
    "zero": lambda _, x: torch.zeros_like(x),
    "in bfloat16": lambda _, x: x.bfloat16().float(),
    "reversed": reverse,
}
ORDER = "norm weights in another order"
EXCHANGED = {
    ("wq", "wk"): "q and k exchanged",
    ("wk", "wv"): "k and v exchanged",
    ("wv", "wq"): "q and v exchanged",
    ("bq", "bk"): "q and k exchanged",
    ("bk", "bv"): "k and v exchanged",
    ("bv", "bq"): "q and v exchanged",
    ("wg", "wq"): "order of fused rows",
    ("bg", "bq"): "order of fused rows",
    ("wg", "wv"): "rows of another role",
    ("wg", "wk"): "rows of another role",
    ("q_norm", "k_norm"): "norm weights of q and k exchanged",
    ("q_norm_bias", "k_norm_bias"): "norm weights of q and k exchanged",
    ("q_norms", "k_norms"): "norm weights of q and k exchanged",
    ("extra_k", "extra_v"): "k and v exchanged",
}
NAMES = {
    "interleaved": "heads interleaved",
    "transposed": "square matrix transposed",
    "negated": "sign",
    "zero": "rows zero",
    "in bfloat16": "dtype's rounding of weights",
    "reversed": "heads permuted",
    "lost": "bias missing",
}
SAME = "the same function"


def name_of(view: str, name: str, fault: str) -> set[str]:
    """Return the right answers: a cause, or that the function is the same."""
    cause = EXCHANGED.get((name, fault.removeprefix("with "))) or NAMES[fault]
    is_norm, is_bias = "_norm" in name, name[0] == "b" or name.endswith("bias")
    if is_norm and fault in ("interleaved", "reversed"):
        cause = ORDER
    if fault == "zero" and is_bias:
        cause = "norm weights missing" if is_norm else "bias missing"
    names = {cause}
    if view != "verify":
        # A key's bias adds a number in common to all scores of a query.
        is_equal = name in ("bk", "k_norm_bias") or (name == "q_norms" and "with" in fault)
        names |= {SAME} if is_equal else {"sinks"} if name == "sink" else set()
    return names


def list_cells() -> Iterator[tuple[str, str, str]]:
    for name in (*OPTIONS, *EXTRA):
        faults = [f"with {other}" for first, other in EXCHANGED if first == name]
        axes = AXES[name]
        for fault in (*faults, *CHANGES, "lost"):
            has_rows = fault != "interleaved" or len(axes) > 1
            is_matrix = fault != "transposed" or len(axes) > 2
            is_bias = fault != "lost" or name[0] == "b"
            if has_rows and is_matrix and is_bias and (fault != "interleaved" or name != "bo"):
                for view in ("verify",) if name in ALONE else ("verify", "two layers", "function"):
                    yield view, name, fault


def right_weights(name: str) -> State:
    generator, layer = torch.Generator().manual_seed(3), Attention(**SIZES, **OPTIONS[name])
    weights = {}
    for each, x in canonical_state(layer, layer.state_dict()).items():
        drawn = torch.randn(x.shape, generator=generator)
        shift = 1.0 if "_norm" in each and not each.endswith("bias") else 0.0
        weights[each] = 0.15 * drawn**3 if each[0] == "w" else shift + 0.4 * drawn
    return weights


def with_fault(weights: State, name: str, fault: str) -> State:
    if fault == "lost":
        return {each: x for each, x in weights.items() if each != name}
    if fault in CHANGES:
        return {**weights, name: CHANGES[fault](name, weights[name]).contiguous()}
    other = fault.removeprefix("with ")
    return {**weights, name: weights[other], other: weights[name]}


def layer_of(name: str, weights: State) -> Attention:
    biases = {option: f"b{role}" in weights for role, option in BIASES.items()}
    layer = Attention(**SIZES, **OPTIONS[name], **biases)
    layer.load_state_dict(layer_state_dict_from_canonical(weights, layer))
    return layer.requires_grad_(False)


def torch_file(fault: str, name: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    layer, stored = (
        torch.nn.MultiheadAttention(32, 4, add_bias_kv=True),
        registry.layout("torch-packed"),
    )
    weights = {
        each: x.detach() ** 3 for each, x in stored.unpack(layer.state_dict(), heads=4).items()
    }
    return stored.pack(with_fault(weights, name, fault) if fault else weights)


def seen(view: str, name: str, fault: str) -> str:
    """Return the only cause that is named; "" for none, or words for the same function."""
    if name in EXTRA:
        moves = verify(torch_file(fault, name), torch_file("", name), heads=4).moves
        return ", ".join(cause for module in moves for cause in module.causes)
    right = right_weights(name)
    a, b = layer_of(name, with_fault(right, name, fault)), layer_of(name, right)
    if view == "verify":
        moves = verify(a.state_dict(), b.state_dict(), heads=4, kv_heads=4).moves
        return ", ".join(cause for module in moves for cause in module.causes)
    diagnosis = compare((lambda x: a(x)) if view == "function" else a, b)
    assert diagnosis.function is not None
    if diagnosis:
        return SAME
    return ", ".join(cause.name for cause in diagnosis.function.causes)


# `make check` tries one tensor of each kind by two layers and by a function.
KINDS = ("wq", "wg")
QUICK = {("two layers", "wg", "negated"), ("function", "bg", "zero")}
QUICK |= {
    cell for cell in list_cells() if cell[0] == "verify" and cell[1] in ("wg", "sink", "q_norms")
}


@pytest.mark.parametrize(
    ("view", "name", "fault"),
    [
        pytest.param(
            *cell,
            id=", ".join(cell),
            marks=()
            if cell in QUICK
            else pytest.mark.slow
            if cell[0] == "verify" or cell[1] in KINDS
            else pytest.mark.extra,
        )
        for cell in list_cells()
    ],
)
def test_the_cause_is_named(view: str, name: str, fault: str) -> None:
    assert seen(view, name, fault) in name_of(view, name, fault)
