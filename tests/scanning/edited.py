"""Edits of a saved scan, with a digest that is right again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_in
from safetensors.torch import save as safetensors_of
from torch import Tensor

from headwise.scanning.file import KEY, hash_nested_content

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def fields_in(path: Path) -> dict[str, Any]:
    """The JSON of a saved scan."""
    raw = path.read_bytes()
    text = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"][KEY]
    found: dict[str, Any] = json.loads(text)
    return found


def edit(path: Path, change: Edit, *, digest: bool = True) -> None:
    """Change the JSON and the tensors of a file; with ``digest``, compute its digest again."""
    about, tensors = fields_in(path), tensors_in(path.read_bytes())
    change(about, tensors)
    text = {name: value for name, value in about.items() if name != "digest"}
    if digest and "digest" in about:
        about["digest"] = hash_nested_content([json_of(text), tensors])
    path.write_bytes(safetensors_of(tensors, metadata={KEY: json_of(about)}))


def json_of(about: dict[str, Any]) -> str:
    """The text that the library would write."""
    return json.dumps(about, sort_keys=True, ensure_ascii=False)


def as_format_1(about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """What headwise 0.1.0 wrote of the same scan."""
    about["version"] = 1
    for layer in about["layers"]:
        del layer["query_text"], layer["key_text"]
    for name in [name for name in tensors if name.startswith("texts/")]:
        del tensors[name]
    del about["digest"]
    for statistic in about["statistics"]:
        del statistic["id"]
