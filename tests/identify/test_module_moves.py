"""What `verify` says of weights that were moved on their way."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise import convert, verify
from headwise.identify.catalogue import MATRIX_TRANSPOSED

HEADS, HEAD_DIM, LAYERS = 4, 6, 3
WIDTH = HEADS * HEAD_DIM
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": HEADS}


def model() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": torch.randn(
            WIDTH, WIDTH, generator=generator
        )
        for layer in range(LAYERS)
        for name in "qkvo"
    }


def moved_names(ported: dict[str, Tensor]) -> list[tuple[str, ...]]:
    diagnosis = verify(ported, model(), config=CONFIG)
    assert not diagnosis
    return [module.causes for module in diagnosis.moves]


def test_equal_weights_have_no_moves() -> None:
    assert verify(model(), model(), config=CONFIG).moves == ()


def test_a_transposed_matrix_of_one_layer_is_named() -> None:
    ported = model()
    name = "model.layers.1.self_attn.o_proj.weight"
    ported[name] = ported[name].mT.contiguous()
    assert moved_names(ported) == [("square matrix transposed",)]
    diagnosis = verify(ported, model(), config=CONFIG)
    assert "`model.layers.1.self_attn`: square matrix transposed (o" in str(diagnosis)


def test_repairs_and_pages_stand_below_the_moves() -> None:
    ported = model()
    for layer in (1, 2):  # the same repair, which is said once
        ported[f"model.layers.{layer}.self_attn.o_proj.weight"] = model()[
            f"model.layers.{layer}.self_attn.o_proj.weight"
        ].mT.contiguous()
    diagnosis = verify(ported, model(), config=CONFIG)
    wrong = "square matrix transposed (o, weights alone)"
    repair, page = "transpose wo: weight.mT", MATRIX_TRANSPOSED.page
    assert diagnosis.lines[-5:-1] == [
        f"  `model.layers.1.self_attn`: {wrong}",
        f"    repair: {repair}",
        f"    more: {page}",
        f"  `model.layers.2.self_attn`: {wrong}",
    ]
    for module in diagnosis.as_dict()["moves"]:
        assert (module["repairs"], module["pages"]) == ((repair,), (page,))


def test_repairs_of_several_moves_undo_the_last_first() -> None:
    ported = model()
    for layer in range(LAYERS):
        q, v = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in "qv")
        ported[q], ported[v] = ported[q].half().float(), -ported[v]
    first, *_ = verify(ported, model(), config=CONFIG).moves
    assert first.causes == ("dtype's rounding of weights", "sign")
    assert (
        first.repair == "undo it in wv: sign; then load the weights in a wider dtype than float16"
    )


def test_a_repair_loads_what_was_not_loaded() -> None:
    names = [f"model.layers.0.self_attn.{name}_proj.bias" for name in "qk"]
    biased = model() | {name: torch.randn(WIDTH) for name in names}
    zero = biased | {name: torch.zeros(WIDTH) for name in names}
    [module] = verify(zero, biased, config={**CONFIG, "attention_bias": True}).moves
    assert module.repairs == ("load the biases bq, bk",)


def test_exchanged_roles_and_layers_are_named() -> None:
    ported = model()
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    ported[q], ported[k] = ported[k], ported[q]
    assert moved_names(ported) == [("q and k exchanged",)]
    ported = model()
    for name in "qkvo":
        one, two = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 2))
        ported[one], ported[two] = ported[two], ported[one]
    diagnosis = verify(ported, model(), config=CONFIG)
    assert [module.causes for module in diagnosis.moves] == [("layers exchanged",)] * 2
    others = [module.is_other_module for module in diagnosis.moves]
    assert others == ["model.layers.2.self_attn", "model.layers.0.self_attn"]


def test_layers_off_by_one_are_named() -> None:
    original = model()
    ported = original | {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": original[
            f"model.layers.{layer + 1}.self_attn.{name}_proj.weight"
        ]
        for layer in range(LAYERS - 1)
        for name in "qkvo"
    }
    assert moved_names(ported) == [("layers off by one",)] * (LAYERS - 1)
    report = str(verify(ported, original, config=CONFIG))
    assert "self_attn` has the weights of `model.layers.1.self_attn`: layers off by one" in report


def test_other_numbers_are_not_explained() -> None:
    ported = model()
    name = "model.layers.2.self_attn.v_proj.weight"
    ported[name] = ported[name] + torch.randn(WIDTH, WIDTH)
    diagnosis = verify(ported, model(), config=CONFIG)
    assert [module.unexplained for module in diagnosis.moves] == [("v",)]


def test_weights_with_one_wrong_entry_were_not_initialised_anew() -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    right = {key: 0.02 * x for key, x in model().items()}
    ported = right | {name: right[name].clone()}
    ported[name][0, 0] += 1
    [module] = verify(right, ported, config=CONFIG).moves
    assert (module.causes, module.unexplained, module.layer) == ((), ("o",), 1)
    ported[name] = 0.02 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    [module] = verify(right, ported, config=CONFIG).moves
    assert module.causes == ("weights at their initial values",)


def test_configs_of_other_rotations_are_not_the_same(tmp_path: Path) -> None:
    for name, theta in (("short", 1e4), ("long", 5e5)):
        (tmp_path / name).mkdir()
        save_file(model(), tmp_path / name / "model.safetensors")
        config = CONFIG | {"rope_theta": theta, "hidden_size": WIDTH}
        (tmp_path / name / "config.json").write_text(json.dumps(config), "utf-8")
    assert verify(tmp_path / "short", tmp_path / "short")
    diagnosis = verify(tmp_path / "short", tmp_path / "long")
    assert not diagnosis
    assert "rope_theta: 10000 in the first, 500000 in the second" in str(diagnosis)


GROUPED = {"heads": 6, "kv_heads": 2}
META = {"first_layout": "llama-meta", "second_layout": "llama"}


def grouped() -> dict[str, Tensor]:
    """One layer in Llama's names: embed_dim 40, 6 heads of 10, 2 kv heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (60, 40), "k": (20, 40), "v": (20, 40), "o": (40, 60)}
    return {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }


def permuted(rows: Tensor, heads: int) -> Tensor:
    """The rows of each head as Meta's code pairs them, by the published permutation."""
    halves = rows.view(heads, 2, len(rows) // heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("k", lambda k: k, "rotary permutation missing (k)"),
        ("k", lambda k: permuted(permuted(k, 2), 2), "rotary permutation doubled (k)"),
        (
            "k",
            lambda k: permuted(k, 1),
            "rotary permutation with a wrong number of heads: made for 1 head instead of 2 (k)",
        ),
        (
            "v",
            lambda v: permuted(v, 2),
            "rotary permutation doubled: values, which do not rotate, were permuted too (v)",
        ),
        (
            "v",
            lambda v: permuted(v, 1),
            "rotary permutation doubled: values, which do not rotate, were permuted too, for 1 "
            "head (v)",
        ),
    ],
)
def test_a_wrong_permutation_is_named_from_the_file_that_has_it(
    role: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    """A file in Meta's layout lacks the permutation if its rows are those of Hugging Face."""
    right = grouped()
    meta = convert(right, "llama", "llama-meta", **GROUPED)
    source = right[f"model.layers.0.self_attn.{role}_proj.weight"]
    meta[f"layers.0.attention.w{role}.weight"] = change(source)
    found = verify(meta, right, **META, **GROUPED)  # type: ignore[arg-type]
    assert f"`layers.0.attention`: {said}" in str(found)


def test_queries_that_are_stored_across_kv_heads_are_named() -> None:
    right, name = grouped(), "model.layers.0.self_attn.q_proj.weight"
    rows = right[name].view(2, 3, 10, 40).transpose(0, 1).reshape(60, 40).contiguous()
    layouts = {"first_layout": "llama", "second_layout": "llama"}
    found = verify(right | {name: rows}, right, **layouts, **GROUPED)  # type: ignore[arg-type]
    said = "stored by kv head, (kv_heads group), and read across kv heads, (group kv_heads) (q)"
    assert f"heads permuted: query heads {said}" in str(found)


def test_signs_of_zeros_are_no_move() -> None:
    right, name = model(), "model.layers.1.self_attn.q_proj.weight"
    right[name][0, 0] = 0.0
    zeros = {n: torch.where(x == 0, -0.0, x) for n, x in right.items()}
    found = verify(zeros, right, config=CONFIG)
    assert found.moves == ()
    assert [line.strip() for line in found.lines] == [
        "llama against llama",
        f"`{name}` (queries of head 0): 1 of 576 entries, zero in both, with the other sign",
        f"Not the same: 11 of 12 tensors are equal; `{name}` differs (queries of head 0).",
    ]


def test_a_layer_without_a_prefix_has_a_name_in_the_comparison_of_outputs() -> None:
    stored = torch.nn.MultiheadAttention(30, 5).state_dict()
    lines = verify(stored, stored, heads=5, outputs=True).lines
    assert lines[1].startswith("  the layer: the same outputs to rounding; ")
