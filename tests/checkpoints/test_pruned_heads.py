"""Folders with pruned_heads, as transformers 4 wrote them: layers have other numbers of heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise import Mask, compare, verify
from headwise.checkpoints import load_attention
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.checkpoints.transformers import load, read_model
from headwise.errors import OptionError
from headwise.function.weights import take_heads
from headwise.identify.detection import detect
from headwise.layouts.modules import find_modules
from headwise.layouts.registry import layout

PRUNED = {0: [1], 1: [0, 3]}  # of 4 heads with 12 channels
COUNTS: dict[str, int] = {"vocab_size": 31, "hidden_size": 48, "num_hidden_layers": 2}
COUNTS |= {"num_attention_heads": 4, "intermediate_size": 20}
KINDS: dict[str, dict[str, Any]] = {
    "Bert": COUNTS,
    "Electra": COUNTS | {"embedding_size": 48},
    "DistilBert": {"vocab_size": 31, "dim": 48, "n_heads": 4, "n_layers": 2, "hidden_dim": 20},
    "GPT2": {"vocab_size": 31, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "ViT": COUNTS | {"image_size": 32, "patch_size": 16},
}


def folders(kind: str, path: Path) -> tuple[Path, Path]:
    """A model's folder, and that of the same model without some heads."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    getattr(transformers, f"{kind}Model")(made).save_pretrained(path / "whole")
    values = json.loads((path / "whole/config.json").read_text())
    stored = load_file(path / "whole/model.safetensors")
    plain = layout(layout_name(values) or "")
    for module in find_modules(plain, stored):
        kept = [head for head in range(4) if head not in PRUNED[module.layer]]
        tensors = {local: stored[name] for name, local in module.tensors.items()}
        fewer = plain.pack(take_heads(plain.unpack(tensors, heads=4), kept, kept))
        stored |= {name: fewer[local].contiguous() for name, local in module.tensors.items()}
    (path / "pruned").mkdir()
    save_file(stored, path / "pruned/model.safetensors", metadata={"format": "pt"})
    pruned = {str(layer): heads for layer, heads in PRUNED.items()}
    (path / "pruned/config.json").write_text(json.dumps(values | {"pruned_heads": pruned}))
    return path / "whole", path / "pruned"


@torch.no_grad()
def without_heads(folder: Path, layer: int, x: Tensor, mask: Mask | None) -> Tensor:
    """The outputs of a whole layer whose output projection ignores the pruned heads."""
    whole = load_attention(folder, layer=layer)
    for head in PRUNED[layer]:
        whole.out_proj.weight[:, 12 * head : 12 * head + 12] = 0
    outputs: Tensor = whole(x, mask=mask)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_has_its_heads(kind: str, tmp_path: Path) -> None:
    whole, pruned = folders(kind, tmp_path)
    x, mask = torch.randn(2, 5, 48), Mask.causal() if kind == "GPT2" else None
    for number, heads in ((0, 3), (1, 2)):
        layer = load_attention(pruned, layer=number)
        assert (layer.num_heads, layer.head_dim) == (heads, 12)
        torch.testing.assert_close(layer(x, mask=mask), without_heads(whole, number, x, mask))


def test_detect_convert_compare_and_verify(tmp_path: Path) -> None:
    _, pruned = folders("Bert", tmp_path)
    assert "heads 3, head_dim 12, embed_dim 48; heads by layer: 3, 2" in str(detect(pruned))
    convert_checkpoint(open_source(pruned), tmp_path / "b", "bert", "megatron", head_dim=12)
    assert [load_attention(tmp_path / "b", layer=n).num_heads for n in (0, 1)] == [3, 2]
    assert bool(verify(pruned, tmp_path / "b"))
    assert verify(pruned, pruned, outputs=True).outputs
    assert bool(compare(str(pruned), str(pruned)))


def test_transformers_5_does_not_build_it(tmp_path: Path) -> None:
    _, pruned = folders("Bert", tmp_path)
    for build in (load, read_model):
        with pytest.raises(OptionError, match="pruned_heads in layers 0, 1, and transformers"):
            build(pruned)
