"""verify: the same function in two layouts, and what is said where it is not."""

from __future__ import annotations

import pytest
import torch

from headwise.layouts.canonical import State
from headwise.layouts.convert import convert
from headwise.layouts.registry import layout
from headwise.layouts.verify import Verification, lines_of, verify
from tests.layouts.examples import example

HEADS = {"heads": 12, "kv_heads": 3}


def llama() -> State:
    state: State = {"model.embed_tokens.weight": torch.randn(50, 40)}
    for layer in range(2):
        own = layout("llama")
        canonical = {n: x for n, x in example(own, seed=layer).items() if not n.startswith("b")}
        packed = own.pack(canonical)
        state |= {f"model.layers.{layer}.self_attn.{name}": x for name, x in packed.items()}
    return state


def of_meta(first: State, second: State) -> Verification:
    return verify(first, second, "llama", "llama-meta", **HEADS)


def test_the_same_function_in_another_layout() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    found = of_meta(first, second)
    assert found
    assert found.same == len(first) == len(second)
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"], second["layers.0.attention.wq.weight"]
    )
    assert lines_of(found, most=3) == []


def test_one_bit_is_found() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "layers.1.attention.wk.weight"
    second[name] = second[name].clone()
    second[name][7, 3] += 0.25
    found = of_meta(first, second)
    assert not found
    assert found.same == len(first) - 1
    assert lines_of(found, most=3) == [
        f"{name}, of model.layers.1.self_attn.k_proj.weight: 1 of 1200 entries, by at most 0.25"
    ]


def test_a_sign_of_zero_is_found() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "layers.1.attention.wo.weight"
    zeros = second[name] == 0
    assert zeros.any()
    second[name] = torch.where(zeros, 0.0, second[name])
    (one,) = of_meta(first, second).differences
    assert one.what == "0 of 5280 entries, by at most 0, and 1 that differ in their sign alone"


def test_keys_permuted_with_the_number_of_query_heads() -> None:
    """The mistake of many converters: every shape stays, and queries are right."""
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    for layer in range(2):
        name = f"layers.{layer}.attention.wk.weight"
        wrong = first[f"model.layers.{layer}.self_attn.k_proj.weight"]
        # 30 rows as 15 heads of 2: head_dim taken from the wrong count
        second[name] = wrong.view(15, 2, 1, 40).transpose(1, 2).reshape(30, 40)
    found = of_meta(first, second)
    assert [one.name for one in found.differences] == [
        f"layers.{layer}.attention.wk.weight" for layer in range(2)
    ]


def test_what_only_one_has() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    del second["layers.0.attention.wv.weight"]
    second["extra"] = torch.zeros(2)
    found = of_meta(first, second)
    assert found.only_first == ("model.layers.0.self_attn.v_proj.weight",)
    assert found.only_second == ("extra",)
    assert not found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_another_dtype_or_shape_is_said(dtype: torch.dtype) -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "tok_embeddings.weight"
    second[name] = second[name].to(dtype)
    assert of_meta(first, second).differences[0].what == f"dtype torch.float32 against {dtype}"
    second[name] = second[name][:7]
    assert of_meta(first, second).differences[0].what == "shape (50, 40) against (7, 40)"


def test_the_same_weights_used_for_another_function_are_not_the_same() -> None:
    state = {n: x for n, x in example(layout("gpt2")).items() if not n.startswith("extra")}
    first = layout("gpt2").pack(state)
    found = verify(first, first, "gpt2", "jais", heads=12)
    assert not found.differences
    assert not found
    assert "scale: 1/sqrt(head_dim) in the first, 1/head_dim in the second" in lines_of(
        found, most=3
    )
