"""What `verify` says of weights that were moved on their way."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise import verify

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
    repair, page = "transpose wo: weight.mT", "causes/square-matrix-transposed.md"
    assert diagnosis.lines[-5:-1] == [
        f"  `model.layers.1.self_attn`: {wrong}",
        f"    repair: {repair}",
        f"    more: {page} in the documentation",
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
