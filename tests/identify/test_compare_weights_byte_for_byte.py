"""verify: the same function in two layouts, and what is said where it is not."""

from dataclasses import replace

import pytest
import torch

from headwise.errors import OptionError
from headwise.function.spec import AttentionSpec, ScaleRule
from headwise.function.weights import State
from headwise.identify.results import TensorComparison
from headwise.identify.tensors import compare_tensors as verify
from headwise.layouts.plan import convert
from headwise.layouts.registry import layout
from tests.layouts.examples import example

HEADS = {"heads": 12, "kv_heads": 3}


def llama() -> State:
    embeddings = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    state: State = {"model.embed_tokens.weight": embeddings}
    for layer in range(2):
        own = layout("llama")
        canonical = {n: x for n, x in example(own, seed=layer).items() if not n.startswith("b")}
        packed = own.pack(canonical)
        state |= {f"model.layers.{layer}.self_attn.{name}": x for name, x in packed.items()}
    return state


def of_meta(first: State, second: State) -> TensorComparison:
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
    assert found.lines(most=3) == []


@pytest.mark.parametrize("first_word", ["", "model."])
@pytest.mark.parametrize("second_word", ["", "model."])
def test_a_base_model_lacks_a_word_in_its_names(first_word: str, second_word: str) -> None:
    """transformers stores LlamaModel so, and LlamaForCausalLM with the word."""
    first, second = (
        {name.replace("model.", word, 1): x for name, x in llama().items()}
        for word in (first_word, second_word)
    )
    found = verify(first, second, "llama", "llama", **HEADS)
    assert found
    assert found.same == len(first)
    assert convert(first, "llama", "qwen2", **HEADS).keys() == first.keys()
    second[f"{second_word}layers.1.self_attn.k_proj.weight"][0, 0] += 1
    assert not verify(first, second, "llama", "llama", **HEADS)


@pytest.mark.parametrize("layers", [1, 2])
def test_modules_at_places_that_are_not_known_keep_them(layers: int) -> None:
    """Their own place is not that of the second's layout, which knows it."""
    first = {
        f"encoder.layers.{n}.self_attn.{name}_proj.{kind}": torch.randn(*shape)
        for n in range(layers)
        for name in ("q", "k", "v", "out")
        for kind, shape in (("weight", (40, 40)), ("bias", (40,)))
    }
    second = convert(first, "headwise", "torch-separate", heads=4)
    assert len(second) == len(first) - 2 * layers  # a fused bias in place of three
    found = verify(first, second, "headwise", "torch-separate", heads=4)
    assert found, found.lines(most=3)


def test_what_is_around_modules_at_unknown_places_keeps_its_names() -> None:
    """Dia's attention has a name of its own, its MLP has Llama's in a base model."""
    first = {
        name.replace("self_attn", "self_attention").removeprefix("model."): x
        for name, x in llama().items()
    }
    first |= {f"layers.{n}.mlp.down_proj.weight": torch.randn(40, 56) for n in range(2)}
    assert convert(first, "llama", "llama", **HEADS).keys() == first.keys()
    assert verify(first, first, "llama", "llama", **HEADS)


def test_a_base_model_with_an_unembedding_is_one_all_the_same() -> None:
    first = {name.replace("model.", ""): x for name, x in llama().items()}
    first["lm_head.weight"] = torch.randn(50, 40)
    second = convert(first, "llama", "nanotron-interleaved", **HEADS)
    found = verify(first, second, "llama", "nanotron-interleaved", **HEADS)
    assert found, found.lines(most=3)


def test_one_bit_is_found() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "layers.1.attention.wk.weight"
    second[name] = second[name].clone()
    second[name][7, 3] += 0.25
    found = of_meta(first, second)
    assert not found
    assert found.same == len(first) - 1
    assert found.lines(most=3) == [
        f"`{name}` (keys of kv head 0), made of `model.layers.1.self_attn.k_proj.weight`: 1 of "
        "1200 entries, by at most 0.25"
    ]
    assert str(found) == (
        f"{len(first) - 1} of {len(first)} tensors are equal; `{name}` differs (keys of kv head 0)"
    )


def test_heads_of_a_fused_tensor_are_named() -> None:
    first = gpt2()
    name = "h.0.attn.c_attn.weight"
    second = first | {name: first[name].clone()}
    for column in (2 * 10, 5 * 10 + 9, 2 * 120 + 11 * 10):  # queries 2 and 5, values 11 of 12
        second[name][3, column] += 1
    (one,) = verify(first, second, "gpt2", "gpt2", heads=12).differences
    assert one.where == "queries of heads 2 and 5; values of kv head 11"


def test_many_heads_and_many_tensors_are_counted() -> None:
    first = llama()
    changed = {name: x + 1 for name, x in first.items() if "_proj" in name}
    assert len(changed) == 8
    found = verify(first, first | changed, "llama", "llama", **HEADS)
    before = "model.layers.0.self_attn"
    assert str(found) == (
        f"1 of 9 tensors are equal; 8 differ: `{before}.q_proj.weight` (queries of all 12 heads), "
        f"`{before}.k_proj.weight` (keys of all 3 kv heads), `{before}.v_proj.weight` (values of "
        "all 3 kv heads) and 5 more"
    )
    name = f"{before}.q_proj.weight"
    some = first | {name: first[name].clone()}
    some[name].view(12, 10, 40)[1:11] += 1
    (one,) = verify(first, some, "llama", "llama", **HEADS).differences
    assert one.where == "queries of heads 1, 2, 3, 4, 5, 6 and 4 more"


def test_what_one_side_lacks_is_counted() -> None:
    first = llama()
    second = {name: x for name, x in first.items() if "1.self_attn.v" not in name}
    second["extra"] = torch.zeros(2)
    found = verify(first, second, "llama", "llama", **HEADS)
    assert str(found) == (
        "8 of 10 tensors are equal; `model.layers.1.self_attn.v_proj.weight` is in the first "
        "alone; `extra` is in the second alone"
    )


def test_a_sign_of_zero_is_found() -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "layers.1.attention.wo.weight"
    zeros = second[name] == 0
    assert zeros.any()
    second[name] = torch.where(zeros, 0.0, second[name])
    (one,) = of_meta(first, second).differences
    assert one.difference_in_words == "1 of 5280 entries, zero in both, with the other sign"


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
    assert found.only_first == {
        "model.layers.0.self_attn.v_proj.weight": ("layers.0.attention.wv.weight",)
    }
    assert found.only_second == ("extra",)
    assert not found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_another_dtype_or_shape_is_said(dtype: torch.dtype) -> None:
    first = llama()
    second = convert(first, "llama", "llama-meta", **HEADS)
    name = "tok_embeddings.weight"
    second[name] = second[name].to(dtype)
    assert (
        of_meta(first, second).differences[0].difference_in_words
        == f"dtype torch.float32 against {dtype}"
    )
    second[name] = second[name][:7]
    assert (
        of_meta(first, second).differences[0].difference_in_words
        == "shape (50, 40) against (7, 40)"
    )


def test_the_same_weights_used_for_another_function_are_not_the_same() -> None:
    state = {n: x for n, x in example(layout("gpt2")).items() if not n.startswith("extra")}
    first = layout("gpt2").pack(state)
    other = replace(layout("gpt2"), name="mup", function=AttentionSpec(scale=ScaleRule(-1.0)))
    found = verify(first, first, "gpt2", other, heads=12)
    assert not found.differences
    assert not found
    assert "scale: 1/sqrt(head_dim) in the first, 1/head_dim in the second" in found.lines(most=3)


def gpt2(seed: int = 0) -> State:
    canonical = example(layout("gpt2"), seed=seed)
    return {f"h.0.attn.{name}": x for name, x in layout("gpt2").pack(canonical).items()}


def test_what_a_fused_tensor_lacks_is_said_once() -> None:
    first = gpt2()
    second = convert(first, "gpt2", "opt", heads=12)
    names = [n for n in second if n.endswith(("k_proj.weight", "v_proj.weight"))]
    for name in names:
        del second[name]
    found = verify(first, second, "gpt2", "opt", heads=12)
    assert found.lines(most=3) == [
        "`h.0.attn.c_attn.weight`: in the first alone; the second has no "
        + ", ".join(f"`{name}`" for name in names)
    ]


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_bias_of_zero_may_be_absent(is_turned: bool) -> None:
    first = llama()
    zeros = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.zeros(width).double()
        for layer in range(2)
        for name, width in (("q", 120), ("k", 30), ("v", 30))
    }
    pair = (first, first | zeros) if is_turned else (first | zeros, first)
    assert verify(*pair, "llama", "llama", **HEADS)
    zeros["model.layers.1.self_attn.k_proj.bias"][7] = -0.0
    pair = (first, first | zeros) if is_turned else (first | zeros, first)
    found = verify(*pair, "llama", "llama", **HEADS)
    alone = found.only_second if is_turned else tuple(found.only_first)
    assert alone == ("model.layers.1.self_attn.k_proj.bias",)


def test_a_bias_without_a_place_is_no_error() -> None:
    second = convert(llama(), "llama", "llama-meta", **HEADS)
    bias = {"model.layers.0.self_attn.v_proj.bias": torch.zeros(30).double()}
    assert of_meta(llama() | bias, second) == of_meta(llama(), second)
    bias["model.layers.0.self_attn.v_proj.bias"][3] = 1
    assert [*of_meta(llama() | bias, second).only_first] == [*bias]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_what_is_not_attention_may_keep_its_name(name: str) -> None:
    first = llama() | {name: torch.randn(40)}
    second = convert(llama(), "llama", "llama-meta", **HEADS) | {name: first[name]}
    found = of_meta(first, second)
    assert found
    assert found.same == len(second)
    assert of_meta(first, second | {name: first[name] + 1}).differences[0].made_of == (name,)
    assert verify(second, first, "llama-meta", "llama", **HEADS)


def test_attention_may_not_keep_its_name() -> None:
    first, name = llama(), "model.layers.0.self_attn.v_proj.weight"
    second = convert(first, "llama", "llama-meta", **HEADS)
    del second["layers.0.attention.wv.weight"]
    assert [*of_meta(first, second | {name: first[name]}).only_first] == [name]


def test_what_the_second_cannot_hold_is_a_difference() -> None:
    found = verify(llama(), gpt2(), "llama", "gpt2", **HEADS)
    assert not found
    (line,) = [line for line in found.lines(most=3) if "cannot hold" in line]
    assert "needed: " in line


def test_what_cannot_be_read_in_its_own_layout_is_an_error() -> None:
    with pytest.raises(OptionError, match="gpt2"):
        verify(llama(), llama(), "gpt2", "llama", **HEADS)
    with pytest.raises(OptionError, match="give heads"):
        verify(llama(), gpt2(), "llama", "gpt2")


NAN = float("nan")


@pytest.mark.parametrize(
    ("mine", "theirs", "what"),
    [
        ([1.0, NAN], [1.0, 1.0], "1 of 2 entries, where one alone is NaN"),
        ([1.0, torch.inf], [1.0, 1.0], "1 of 2 entries, where one is infinite"),
        ([-torch.inf, 3.0], [torch.inf, 1.0], "2 of 2 entries: 1 by at most 2, 1 where one is inf"),
        ([0.0, NAN], [-0.0, NAN], "1 of 2 entries, zero in both, with the other sign"),
    ],
)
def test_numbers_that_are_none_are_said(mine: list[float], theirs: list[float], what: str) -> None:
    first, second = (llama() | {"x": torch.tensor(x)} for x in (mine, theirs))
    (found,) = verify(first, second, "llama", "llama", **HEADS).differences
    assert found.difference_in_words.startswith(what)


def test_other_bits_of_a_nan_are_said() -> None:
    x = torch.tensor([NAN, 1.0])
    other = x.clone()
    other.view(torch.int32)[0] ^= 1
    first, second = (llama() | {"x": each} for each in (x, other))
    (found,) = verify(first, second, "llama", "llama", **HEADS).differences
    assert found.difference_in_words == "1 of 2 entries, NaN in both, with other bits"


def test_numbers_of_eight_bits_are_compared() -> None:
    x = torch.tensor([1.0, 2.0, -0.0]).to(torch.float8_e4m3fn)
    y = torch.tensor([1.0, 4.0, 0.0]).to(torch.float8_e4m3fn)
    first, second = (llama() | {"x": each} for each in (x, y))
    (found,) = verify(first, second, "llama", "llama", **HEADS).differences
    assert (
        found.difference_in_words
        == "2 of 3 entries: 1 by at most 2, 1 zero in both, with the other sign"
    )


def test_evidence_has_the_numbers_that_its_sentence_says() -> None:
    first = llama()
    (found,) = verify(first, first | {"x": torch.ones(2)}, "llama", "llama", **HEADS).only_second
    assert found == "x"
    second = first | {"x": torch.tensor([1.5, NAN])}
    (one,) = verify(first | {"x": torch.zeros(2)}, second, "llama", "llama", **HEADS).differences
    assert one.kind == "entries"
    kinds = {"apart": 1, "infinite": 0, "nan": 1, "nan_bits": 0, "zero_signs": 0}
    assert one.numbers == {"entries": 2, "differing": 2, "largest": 1.5, **kinds}


def test_a_damaged_first_is_compared_in_its_own_layout_and_told_as_the_first() -> None:
    """A tensor that is missing or of another shape, against another layout, from both sides."""
    whole = llama()
    meta = convert(whole, "llama", "llama-meta", **HEADS)
    name = "model.layers.1.self_attn.k_proj.weight"
    less = {n: x for n, x in whole.items() if n != name}
    assert of_meta(less, meta).only_second == ("layers.1.attention.wk.weight",)
    assert of_meta(less, meta).same == len(less)
    wrong = of_meta(whole | {name: torch.zeros(7, 40)}, meta)
    back = verify(meta, whole | {name: torch.zeros(7, 40)}, "llama-meta", "llama", **HEADS)
    assert [one.sides for one in wrong.differences] == [("(7, 40)", "(30, 40)")]
    assert [one.sides for one in back.differences] == [("(30, 40)", "(7, 40)")]
