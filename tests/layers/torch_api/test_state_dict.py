"""Both forms of the input projection load into either form, where the widths allow."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, MultiheadAttention
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, QUERIES, pair

X = torch.randn(QUERIES, BATCH, EMBED)


def separate_layer() -> MultiheadAttention:
    """A layer that holds three weights of the packed form's width, as fairseq's does."""
    layer = MultiheadAttention(EMBED, HEADS, kdim=12)
    layer.kdim = EMBED
    layer.k_proj_weight = nn.Parameter(torch.randn(EMBED, EMBED))
    return layer


def separated(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The same weights in the separate form."""
    state = dict(state)
    names = [f"{prefix}{x}_proj_weight" for x in "qkv"]
    return state | dict(zip(names, state.pop(f"{prefix}in_proj_weight").chunk(3), strict=True))


def test_torchs_own_layer_refuses_the_other_form() -> None:
    theirs, _ = pair(dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .in_proj_weight"):
        theirs.load_state_dict(separated(theirs.state_dict()))


@pytest.mark.parametrize("assign", [False, True])
def test_separate_into_packed(assign: bool) -> None:
    theirs, ours = pair(dtype=torch.float32)
    fresh = MultiheadAttention(EMBED, HEADS)
    result = fresh.load_state_dict(separated(theirs.state_dict()), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(fresh.in_proj_weight, theirs.in_proj_weight)
    assert torch.equal(fresh(X, X, X)[0], ours(X, X, X)[0])


@pytest.mark.parametrize("assign", [False, True])
def test_packed_into_separate(assign: bool) -> None:
    theirs, ours = pair(dtype=torch.float32)
    fresh = separate_layer()
    fresh.load_state_dict(theirs.state_dict(), assign=assign)
    for name, weight in zip("qkv", theirs.in_proj_weight.chunk(3), strict=True):
        held = getattr(fresh, f"{name}_proj_weight")
        assert isinstance(held, nn.Parameter)
        assert torch.equal(held, weight)
        assert held.untyped_storage().nbytes() == held.numel() * 4  # no part of a larger one
    torch.testing.assert_close(fresh(X, X, X)[0], ours(X, X, X)[0])


def test_same_form_is_torchs_own_loading() -> None:
    for options in ({}, {"kdim": 12, "vdim": 7, "add_bias_kv": True}, {"bias": False}):
        theirs, ours = pair(dtype=torch.float32, **options)
        assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
        assert theirs.load_state_dict(ours.state_dict()).missing_keys == []


def test_inside_a_model_and_the_callers_dict_is_not_touched() -> None:
    model = nn.ModuleDict(
        {"a": MultiheadAttention(EMBED, HEADS), "b": nn.Sequential(separate_layer())}
    )
    state = OrderedDict(copy.deepcopy(model.state_dict()))
    packed = OrderedDict((k, v) for k, v in state.items() if not k.startswith("b.0"))
    packed |= {f"b.0.{k}": v for k, v in MultiheadAttention(EMBED, HEADS).state_dict().items()}
    crossed = separated(packed, "a.")
    keys, versions = list(crossed), {k: v._version for k, v in crossed.items()}
    model.load_state_dict(crossed)
    assert torch.equal(model["a"].in_proj_weight, state["a.in_proj_weight"])
    assert torch.equal(model["b"][0].q_proj_weight, packed["b.0.in_proj_weight"][:EMBED])
    assert torch.equal(model["b"][0].out_proj.weight, packed["b.0.out_proj.weight"])
    assert list(crossed) == keys
    assert {k: v._version for k, v in crossed.items()} == versions


@pytest.mark.parametrize("strict", [True, False])
def test_widths_that_cannot_fit_say_so(strict: bool) -> None:
    packed, separate = MultiheadAttention(EMBED, HEADS), MultiheadAttention(EMBED, HEADS, kdim=12)
    with pytest.raises(RuntimeError) as error:
        separate.load_state_dict(packed.state_dict(), strict=strict)
    assert (
        "size mismatch for in_proj_weight: the packed weight (180, 60) in the checkpoint holds"
        " three of shape (60, 60), but this layer has q_proj_weight (60, 60),"
        " k_proj_weight (60, 12), v_proj_weight (60, 60)."
    ) in str(error.value)
    with pytest.raises(RuntimeError) as error:
        packed.load_state_dict(separate.state_dict(), strict=strict)
    assert "k_proj_weight (60, 12)" in str(error.value)
    assert "packs three of shape (60, 60) into (180, 60)" in str(error.value)


def test_half_a_form_is_missing_keys_as_in_torch() -> None:
    ours = MultiheadAttention(EMBED, HEADS)
    state = separated(ours.state_dict())
    del state["k_proj_weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(state)
    assert ours.load_state_dict(state, strict=False).missing_keys == ["in_proj_weight"]


def test_both_forms_at_once_are_left_to_torch() -> None:
    ours = MultiheadAttention(EMBED, HEADS)
    state = ours.state_dict() | separated(ours.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict(state)


def test_a_hook_that_renames_keys_still_runs() -> None:
    ours = MultiheadAttention(EMBED, HEADS)

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "")] = state.pop(key)

    ours.register_load_state_dict_pre_hook(rename)
    state = {f"old.{k}": v for k, v in MultiheadAttention(EMBED, HEADS).state_dict().items()}
    ours.load_state_dict(state)
    assert torch.equal(ours.out_proj.weight, state["old.out_proj.weight"])


@pytest.mark.parametrize("layer", [MultiheadAttention, Attention])
def test_tensors_of_a_whole_checkpoint_have_a_line_that_loads_them(layer: type[nn.Module]) -> None:
    ours, other = layer(EMBED, HEADS), layer(EMBED, HEADS)
    named = {f"module.{name}": tensor for name, tensor in other.state_dict().items()}
    for state in ({"model": other.state_dict()}, named, {"model": named}):
        for _ in range(2 if state.get("model") is named else 1):
            with pytest.raises(RuntimeError) as error:
                ours.load_state_dict(state)
            *_, hint = str(error.value).splitlines()
            line = hint.partition(": ")[2].removeprefix("layer.load_state_dict(").removesuffix(")")
            state = eval(line, {}, {"state": state})
        ours.load_state_dict(state)
        assert all(map(torch.equal, ours.state_dict().values(), other.state_dict().values()))
