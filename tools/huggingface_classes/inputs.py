"""Small random inputs for any model, by the names in its forward signature.

Several attempts, the richest first: text with images or sound in it, then each alone. The first
that the model runs on is taken; what it leaves idle is in the record.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tools.huggingface_classes.shrink import WIDTH
from tools.huggingface_classes.special_inputs import FIRST, REQUIRED

BATCH, LENGTH, DECODED, FRAMES, WAVE = 3, 13, 7, 64, 4032
PADDING = 4
Inputs = dict[str, Any]

# What code of others may raise on a configuration or an input that does not suit it.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def attempts(model: PreTrainedModel, model_type: str) -> Iterator[Inputs]:
    """Inputs to try, the richest first."""
    torch.manual_seed(3)
    takes = {
        name: p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        for name, p in inspect.signature(model.forward).parameters.items()
    }
    config = model.config
    if model_type in FIRST:
        yield FIRST[model_type](config)
    required = {n: REQUIRED[n](config) for n, needed in takes.items() if needed and n in REQUIRED}
    for given in _by_name(model, config, takes):
        yield {**required, **given}
    yield dict(model.dummy_inputs)


def _by_name(
    model: PreTrainedModel, config: PreTrainedConfig, takes: dict[str, bool]
) -> Iterator[Inputs]:
    texts, images, sounds = _text(config, takes), _images(config, takes), _sounds(config, takes)
    if texts:
        for seen in images:
            yield from _with_placeholders(model, texts, seen, ("image",))
        for heard in sounds:
            yield from _with_placeholders(model, texts, heard, ("audio",))
    for other in [*images, *sounds]:
        yield {**texts, **other}
    if texts:
        yield texts
    yield from (x for x in [*images, *sounds] if x)
    yield {name: _hidden(config) for name in ("hidden_states", "inputs_embeds") if takes.get(name)}
    if "inputs_embeds" in takes:
        yield {"inputs_embeds": _hidden(config)}
    yield {}


def find(config: Any, *names: str) -> Any:
    """The first of these fields, in the configuration or in a part of it; None elsewhere."""
    if not isinstance(config, PreTrainedConfig):
        return None
    for name in names:
        value = getattr(config, name, None)
        if value is not None and not callable(value):
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            value = find(part, *names)
            if value is not None:
                return value
    return None


def tokens(config: PreTrainedConfig, length: int) -> Tensor:
    """Random tokens that mean nothing special."""
    size = find(config, "vocab_size") or 100
    return torch.randint(110 if size > 120 else min(5, size - 1), size, (BATCH, length))


def padding(length: int) -> Tensor:
    """1 = real; the last row is shorter."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, -PADDING:] = 0
    return mask


def _hidden(config: PreTrainedConfig) -> Tensor:
    return torch.randn(BATCH, LENGTH, find(config, "hidden_size", "d_model") or WIDTH)


def _text(config: PreTrainedConfig, takes: dict[str, bool]) -> Inputs:
    found: Inputs = {}
    if "input_ids" in takes:
        found["input_ids"] = tokens(config, LENGTH)
        if "attention_mask" in takes:
            found["attention_mask"] = padding(LENGTH)
        if takes.get("bbox") is not None:
            corner = torch.randint(0, 40, (BATCH, LENGTH, 2))
            found["bbox"] = torch.cat([corner, corner + 7], -1)
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = tokens(config, DECODED)
    return found


def _images(config: PreTrainedConfig, takes: dict[str, bool]) -> list[Inputs]:
    names = [n for n in ("pixel_values", "image", "pixel_values_videos") if n in takes]
    grid = next((n for n in ("image_grid_thw", "grid_thw") if n in takes), None)
    if grid and ("hidden_states" in takes or "pixel_values" in takes):
        return _patches(config, takes, grid)
    if not names:
        return []
    size = find(config, "image_size", "input_size", "img_size", "crop_size") or 64
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    channels = find(config, "num_channels", "in_channels", "in_chans")
    channels = channels if isinstance(channels, int) else 3
    image = torch.randn(BATCH, channels, high, wide)
    frames = find(config, "num_frames", "frames_per_clip", "video_size") or 4
    frames = frames if isinstance(frames, int) else 4
    video = torch.randn(BATCH, frames, channels, high, wide)
    first = names[0]
    if first == "pixel_values_videos":
        return [{first: video}]
    mask = {"pixel_mask": torch.ones(BATCH, high, wide, dtype=torch.long)}
    more = mask if "pixel_mask" in takes else {}
    if "image_sizes" in takes:
        more = {**more, "image_sizes": torch.tensor([[high, wide]] * BATCH)}
    one: Inputs = {first: image[:, None]}
    if "image_attention_mask" in takes:
        one["image_attention_mask"] = torch.ones(BATCH, LENGTH, 1, dtype=torch.long)
    pair: Inputs = {first: video[:, :2]}
    return [{first: image, **more}, {first: image}, {first: video}, one, pair]


def _patches(config: PreTrainedConfig, takes: dict[str, bool], grid: str) -> list[Inputs]:
    """Two images as one row of patches, as Qwen2-VL has them, flat or not."""
    vision = getattr(config, "vision_config", config)
    edge = find(vision, "patch_size", "spatial_patch_size") or 16
    channels = find(vision, "in_channels", "in_chans", "num_channels") or 3
    sizes = torch.tensor([[1, 4, 4], [1, 4, 8]])
    name = "pixel_values" if "pixel_values" in takes else "hidden_states"
    images = torch.randn(int(sizes.prod(-1).sum()), channels, 2, edge, edge)
    deep = find(vision, "temporal_patch_size") or 1
    one = images[:, :, 0]
    found = [images[:, :, :deep].flatten(1), images.flatten(1), one, one[None]]
    return [{name: x, grid: sizes} for x in found]


def _sounds(config: PreTrainedConfig, takes: dict[str, bool]) -> list[Inputs]:
    audio = getattr(config, "audio_config", config)
    found: list[Inputs] = []
    bins = find(audio, "num_mel_bins", "feature_size", "input_dim", "input_feat_size", "n_mels")
    bins = bins if isinstance(bins, int) else 80
    for name in ("input_features", "input_values", "audio_values"):
        if name not in takes:
            continue
        spectra = [torch.randn(BATCH, bins, FRAMES), torch.randn(BATCH, FRAMES, bins)]
        spectra += [torch.randn(BATCH, FRAMES, 128), spectra[1][:, None]]
        waves = [torch.randn(BATCH, WAVE), torch.randn(BATCH, 1, WAVE)]
        both = [*spectra, *waves] if name == "input_features" else [*waves, *spectra]
        for each in both:
            masks = ("input_features_mask", "feature_attention_mask", "padding_mask")
            frames = torch.ones(BATCH, FRAMES, dtype=torch.long)
            more = {mask: frames for mask in masks if mask in takes and each.shape[-1] != WAVE}
            found += [{name: each, **more}, {name: each}] if more else [{name: each}]
    return found


def _with_placeholders(
    model: PreTrainedModel, texts: Inputs, other: Inputs, kinds: tuple[str, ...]
) -> Iterator[Inputs]:
    """Text in which each image or sound has as many placeholders as it gives features."""
    for kind in kinds:
        token = find(model.config, f"{kind}_token_id", f"{kind}_token_index")
        get = getattr(model, f"get_{kind}_features", None)
        if not isinstance(token, int) or get is None:
            continue
        try:
            rows = _features(get(**other), images=BATCH)
        except ERRORS:  # it takes images or sounds in another form
            continue
        ids = torch.full((BATCH, max(rows)), token)
        ids = torch.cat([texts["input_ids"][:, :3], ids, texts["input_ids"][:, 3:]], 1)
        mask = torch.ones_like(ids)
        for row, count in enumerate(rows):
            ids[row, 3 + count : 3 + max(rows)] = texts["input_ids"][0, 0]
        mask[-1, -PADDING:] = 0
        found = {**texts, **other, "input_ids": ids}
        if "attention_mask" in texts:
            found["attention_mask"] = mask
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            found["mm_token_type_ids"] = (ids == token).int()
        yield found
        yield {n: x for n, x in found.items() if n != "mm_token_type_ids"}


def _features(found: Any, *, images: int) -> list[int]:
    """How many features each row of text is given."""
    found = getattr(found, "pooler_output", found)
    if isinstance(found, Tensor):
        total = found.numel() // found.shape[-1]
        return [total // images] * images
    counts = [x.numel() // x.shape[-1] for x in found]
    if len(counts) == images:
        return counts
    return [*counts, *[0] * (images - len(counts))][:images]
