"""What a model of transformers writes to its file, found there by the names of a layout."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.function.spec import FROM_CONFIG
from headwise.layouts._layout import Layout
from headwise.layouts.modules import find_modules, find_unlisted_tensors_of_module
from headwise.layouts.registry import layout
from tests.layouts.real import sharpen

SINGLE = torch.finfo(torch.float32).eps
VOCABULARY = 50
# No two axes of a fused tensor coincide: 8 heads of 5.
WIDTHS: dict[str, Any] = {
    "hidden_size": 40,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
}
ROTATED = WIDTHS | {"hidden_size": 60, "num_attention_heads": 6}  # an even head_dim
HEADS = {"num_heads": 8}


def model_of(kind: str, **sizes: Any) -> Any:
    """A small random model of transformers in float64."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{kind}Model")(config).double().eval()
    sharpen(model)
    return model


def file_of(model: Any) -> dict[str, Tensor]:
    """The tensors of the file that the model is saved to, by the names that they have there."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = pytest.importorskip("safetensors.torch").load_file(
            Path(folder) / "model.safetensors"
        )
        return {name: tensor.clone() for name, tensor in tensors.items()}


def written(model: Any, name: str, *, role: str = "self", **numbers: int) -> dict[str, Tensor]:
    """The tensors of one attention module in the file, by their names within it.

    The layout has to find the module at its place, and to know everything that is in it.
    """
    tensors, described = file_of(model), layout(name)
    wanted = {key: str(number) for key, number in numbers.items()}
    found = [
        module
        for module in find_modules(described, tensors)
        if module.place.role == role and dict(module.place.numbers) == wanted
    ]
    assert len(found) == 1
    assert find_unlisted_tensors_of_module(found[0], described) == []
    return {local: tensors[full] for full, local in found[0].tensors.items()}


def own_tensors(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Those of a module alone that are attention's; the layout has to know the others."""
    described = layout(name)
    state = module.state_dict()
    others = [local for local in state if local not in described.tensors]
    assert all(any(fnmatchcase(local, known) for known in described.beside) for local in others)
    return {local: x.clone() for local, x in state.items() if local in described.tensors}


def within(model: nn.Module, ending: str) -> Any:
    """The module whose name ends so."""
    pattern = re.compile(rf"(.*\.)?{re.escape(ending)}$")
    (found,) = (module for name, module in model.named_modules() if pattern.match(name))
    return found


def left_open(name: str, *said: str) -> Layout:
    """A layout that does not say of its function what the layer has no option for."""
    described = layout(name)
    return replace(
        described, function=replace(described.function, **dict.fromkeys(said, FROM_CONFIG))
    )


def hidden_later(length: int) -> Tensor:
    """What is added to the scores of a causal layer of transformers."""
    least = torch.finfo(torch.float64).min
    return torch.full((length, length), least, dtype=torch.float64).triu(1)[None, None]
