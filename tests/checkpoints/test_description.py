"""Files that state their layout, counts and function, and are refused where these are wrong."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headwise import detect, verify
from headwise.checkpoints.config import merge_stated_counts
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.description import (
    KEY,
    Description,
    describe_target,
    layout_with_described_function,
    read_description,
)
from headwise.checkpoints.fields import ConfigFields
from headwise.checkpoints.source import open_source
from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.function.spec import ABSENT, USUAL_SCALE
from headwise.layouts.catalogue import OPEN
from headwise.layouts.registry import layout, layouts_by_name
from tests.checkpoints import llamas
from tests.identify.test_detect import file_of
from tests.layouts.examples import known_of
from tests.refusals import refusals

ROTATION = {"rope_theta": 500.0, "rms_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that was converted into Meta's layout, in three files without a config.json."""
    home = tmp_path_factory.mktemp("described")
    source = llamas.in_files(home / "a")
    config = json.loads((source / "config.json").read_text())
    config |= {**ROTATION, "_name_or_path": "/home/someone/a"}
    (source / "config.json").write_text(json.dumps(config))
    llamas.to_meta(source, home / "b")
    return home / "b"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def rewritten(
    meta: Path, target: Path, change: Callable[[dict[str, Any]], Any], files: str = "*.safetensors"
) -> Path:
    """A copy in which the description of some files is another: changed, or what is returned."""
    shutil.copytree(meta, target)
    for path in target.glob(files):
        about = metadata(path)
        stored = json.loads(about[KEY])
        changed = change(stored)
        about[KEY] = changed if isinstance(changed, str) else json.dumps(stored)
        save_file(load_file(path), path, metadata=about)
    return target


def test_every_file_says_what_no_tensor_holds(meta: Path) -> None:
    texts = {metadata(path)[KEY] for path in meta.glob("*.safetensors")}
    (text,) = texts
    stored = json.loads(text)
    assert stored["layout"] == "llama-meta"
    assert stored["modules"] == llamas.LAYERS
    assert stored["counts"] == {"heads": 6, "kv_heads": 2, "head_dim": 10}
    assert stored["function"]["rotary"] == "interleaved"
    assert stored["config"] == {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 40,
        "head_dim": 10,
        **ROTATION,
    }


def test_layout_and_counts_need_not_be_given(meta: Path, tmp_path: Path) -> None:
    found = detect(meta)
    assert found.layout is not None
    assert found.layout.name == "llama-meta"
    assert found.compared == ("names", "shapes", "metadata", "config")
    assert verify(meta, meta.parent / "a")


def test_other_metadata_is_kept(tmp_path: Path) -> None:
    llamas.one_file(tmp_path / "a.safetensors")
    llamas.to_meta(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    about = metadata(tmp_path / "b.safetensors")
    assert json.loads(about.pop(KEY))["layout"] == "llama-meta"
    assert about == {"format": "pt", "by": "hand"}


@pytest.mark.parametrize("name", sorted(layouts_by_name()))
def test_a_description_is_read_back_and_fits(name: str, tmp_path: Path) -> None:
    of = layout(name)
    file, _ = file_of(of)
    described = describe_target(file, of, of, known_of(of), {"n_head": 12})
    described.require_fit_to_headers(file)
    assert described.layout == of
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", {KEY: described.encode()})
    again = read_description(open_source(tmp_path / "x.safetensors"))
    assert again is not None
    assert (again.layout, again.modules, again.counts, again.config) == (
        described.layout,
        described.modules,
        described.counts,
        described.config,
    )


@pytest.mark.parametrize(
    ("source", "target", "rotary"),
    [
        ("llama", "llama-meta", "interleaved"),
        ("llama-meta", "llama", "half-split"),
        ("llama-meta", "headwise", "half-split"),
        ("cohere2", "llama-meta", "interleaved"),
        ("gpt2", "headwise", "none"),
        ("headwise", "torch-packed", None),
    ],
)
def test_weights_keep_their_function_in_a_layout_that_says_another(
    source: str, target: str, rotary: str | None
) -> None:
    is_known = source in layouts_by_name()
    before = layout(source) if is_known else replace(layout("llama"), function=OPEN)
    moved = layout(target).of_weights_from(before)
    same = {"rotary": ABSENT}
    assert replace(moved.function, **same) == replace(before.function, **same)
    assert moved.settings()["rotary"] == rotary


def test_an_accepted_difference_is_not_forgotten(tmp_path: Path) -> None:
    source = llamas.one_file(tmp_path / "a.safetensors")
    jax, back = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    counts = llamas.COUNTS
    convert_checkpoint(open_source(source), jax, "llama", "maxtext", accept=["scale"], **counts)
    described = read_description(open_source(jax))
    assert described is not None
    assert layout("maxtext").function.scale == 1.0
    assert layout_with_described_function("maxtext", described).function.scale == USUAL_SCALE
    convert_checkpoint(open_source(jax), back, "maxtext", "llama", **counts)
    llamas.assert_same(llamas.read(back), llamas.weights())
    assert verify(jax, back)


def test_rows_have_the_order_of_their_layout_where_the_function_does_not_rotate(
    tmp_path: Path,
) -> None:
    """OPT's weights in Meta's layout, accepted: its rows are interleaved, whoever reads them."""
    start = "decoder.layers.0.self_attn."
    state = {f"{start}{name}_proj.weight": torch.randn(40, 40) for name in ("q", "k", "v", "out")}
    first, meta, back = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_file(state, first)
    convert_checkpoint(open_source(first), meta, "opt", "llama-meta", accept=["rotary"], heads=4)
    described = read_description(open_source(meta))
    assert described is not None
    assert described.layout.settings()["rotary"] == "none"
    diagnosis = verify(first, meta, first_layout="opt", heads=4)
    assert diagnosis
    assert not diagnosis.moves
    convert_checkpoint(open_source(meta), back, "llama-meta", "opt", heads=4)
    llamas.assert_same(llamas.read(back), state)


def test_counts_that_only_the_shapes_of_the_source_tell(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(4, 6, 24) for n in "qkv"} | {"wo": torch.randn(24, 24)}
    save_file(state, tmp_path / "a.safetensors")
    opened, packed = open_source(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    convert_checkpoint(opened, packed, "per-head", "torch-packed")
    described = read_description(open_source(packed))
    assert described is not None
    assert described.counts == {"heads": 4, "kv_heads": 4, "head_dim": 6}
    described.require_fit_to_headers(open_source(packed).headers)


def test_a_layout_with_places_for_norms_that_the_weights_have_not(tmp_path: Path) -> None:
    source = llamas.one_file(tmp_path / "a.safetensors")
    done = convert_checkpoint(
        open_source(source), tmp_path / "b.safetensors", "llama", "vllm", **llamas.COUNTS
    )
    found = detect(done.target)
    assert found.layout is not None
    assert (found.layout.name, found.layout.function.qk_norm) == ("vllm", ABSENT)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored.pop(name) and None


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no JSON": (lambda s: "{", "no JSON"),
    "a name twice": (lambda s: '{"version": 1, "version": 1}', "occurs twice"),
    "other JSON": (lambda s: "[1]", "holds a list"),
    "no version": (drop("version"), "has no version"),
    "a newer version": (lambda s: s.update(version=2), "has version 2; this headwise reads 1"),
    "an unknown layout": (lambda s: s.update(layout="lama"), "unknown layout 'lama'"),
    "a layout that is none": (lambda s: s.update(layout=3), "unknown layout 3"),
    "no modules": (lambda s: s.update(modules=0), "has 0 modules"),
    "counts that are a list": (lambda s: s.update(counts=[6]), "the counts [6]"),
    "a count of 0": (lambda s: s["counts"].update(heads=0), "'heads': 0"),
    "no function": (drop("function"), "no function with the fields"),
    "an unknown field": (lambda s: s["function"].update(form="x"), "no function with the fields"),
    "a number in the function": (
        lambda s: s["function"].update(scale=1),
        "value that is no text",
    ),
    "an unknown softcap": (lambda s: s["function"].update(softcap="50"), "softcap=Other"),
    "a config that is a list": (lambda s: s.update(config=[]), "a config that is a list"),
    "another layout": (lambda s: s.update(layout="gpt2"), "describes 2 modules of gpt2, but"),
    "other heads": (lambda s: s["counts"].update(heads=7), "modules of llama-meta, but"),
    "an unknown count": (lambda s: s["counts"].update(towers=2), "a count of towers"),
    "fewer modules": (lambda s: s.update(modules=3), "but the tensors are of 2"),
    "a config of other heads": (
        lambda s: s["config"].update(num_attention_heads=12),
        "heads 12, where the metadata of",
    ),
}


@pytest.mark.parametrize("ask", [detect, lambda path: verify(path, path)], ids=["detect", "verify"])
@pytest.mark.parametrize("row", WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_refused(
    meta: Path, tmp_path: Path, row: tuple[Callable[[dict[str, Any]], Any], str], ask: Any
) -> None:
    change, words = row
    with pytest.raises(HeadwiseError) as error:
        ask(rewritten(meta, tmp_path / "b", change))
    assert isinstance(error.value, (CheckpointError, OptionError))
    assert words in error.value.saw
    assert error.value.do


def test_files_of_two_conversions_are_refused(meta: Path, tmp_path: Path) -> None:
    target = rewritten(
        meta, tmp_path / "b", lambda s: s["config"].clear(), "model-00002-of-00003.safetensors"
    )
    with pytest.raises(CheckpointError, match="describe different checkpoints"):
        detect(target)


def tensors_of(path: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite a file, with its metadata as it was and other tensors."""
    state: dict[str, Any] = {**load_file(path), **changes}
    kept = {name: x for name, x in state.items() if x is not None}
    save_file(kept, path, metadata=metadata(path))


CHANGES: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "a layer is gone": (
        {f"layers.1.attention.w{n}.weight": None for n in "qkvo"},
        "but the tensors are of 1",
    ),
    "a matrix is gone": ({"layers.1.attention.wk.weight": None}, "layers.1.attention.wk.weight"),
    "fewer heads": (
        {"layers.0.attention.wq.weight": torch.zeros(50, 40, dtype=torch.bfloat16)},
        "wq.weight has an axis of 50",
    ),
    "integers": (
        {"layers.0.attention.wq.weight": torch.zeros(60, 40, dtype=torch.int8)},
        "in torch.int8",
    ),
    "an adapter": (
        {"layers.0.attention.wq.lora_A.weight": torch.zeros(4, 40)},
        "wq.lora_A.weight",
    ),
}


@pytest.mark.parametrize("row", CHANGES.values(), ids=CHANGES)
def test_tensors_that_changed_since_are_refused(
    tmp_path: Path, row: tuple[dict[str, torch.Tensor | None], str]
) -> None:
    llamas.one_file(tmp_path / "a.safetensors")
    path = llamas.to_meta(tmp_path / "a.safetensors", tmp_path / "b.safetensors").target
    tensors_of(path, **row[0])
    with pytest.raises(CheckpointError) as error:
        detect(path)
    assert error.value.saw.startswith(f"the metadata of {path} describes 2 modules of llama-meta,")
    assert row[1] in error.value.saw
    # The remedy that the message gives.
    save_file(load_file(path), tmp_path / "new.safetensors", metadata={"format": "pt"})
    assert f"load_file({path.name!r})" in error.value.do
    detect(tmp_path / "new.safetensors", heads=6, kv_heads=2)


def test_a_part_of_a_checkpoint_is_refused_with_its_folder(meta: Path) -> None:
    with pytest.raises(CheckpointError, match="name the folder if this is one of several files"):
        detect(meta / "model-00001-of-00003.safetensors")


def test_a_config_beside_the_weights_comes_first(meta: Path, tmp_path: Path) -> None:
    shutil.copytree(meta, tmp_path / "b")
    config = {"model_type": "llama", "num_attention_heads": 6, "rope_theta": 7.0}
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    found = detect(tmp_path / "b")  # the model is a llama, and the file is in Meta's layout
    assert found.layout is not None
    assert found.layout.name == "llama-meta"
    assert found.contradiction is None
    config["num_attention_heads"] = 12
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="heads 12, where the metadata of"):
        detect(tmp_path / "b")


DESCRIBED = Description(layout("llama"), 1, {"heads": 6}, ConfigFields({}), "the metadata of x")
test_counts_that_contradict = refusals(
    {
        "another count": (
            lambda: merge_stated_counts(DESCRIBED.counts, {"heads": 3}, origin=DESCRIBED.origin),
            OptionError,
            ("heads 3, where the metadata of x says 6", "leave out heads"),
        )
    }
)


@pytest.mark.parametrize("seed", range(60))
def test_metadata_mutated_at_random_is_read_or_refused(meta: Path, seed: int) -> None:
    chance = random.Random(seed)
    about = metadata(meta / "model-00001-of-00003.safetensors")[KEY]

    def mutated() -> str:
        letters = list(about)
        for _ in range(chance.choice([1, 1, 2, 3])):
            letters[chance.randrange(len(letters))] = chance.choice('0193"{}[],:.eax -\x00é')
        return "".join(letters)

    source = open_source(meta)
    text = mutated()
    for shard in source.shards:
        shard.metadata[KEY] = text
    try:
        described = read_description(source)
        assert described is not None
        described.require_fit_to_headers(source.headers)
    except HeadwiseError:
        return
    assert described.layout.name in layouts_by_name()
