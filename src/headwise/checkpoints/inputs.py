"""Inputs of a proof: small random texts, images and sounds, by the names that a class takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import pi, prod
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.rotations import PLANES
from headwise.support.private_torch import tree_map

BATCH, SHORT, LONG, SOURCE, LATE, PADDING = 2, 24, 64, 19, 7, 5
EDGE, FRAMES, REGIONS, WAVE = 4, 4, 5, 4000  # patches of a side, images of a video, boxes, samples
PAIR = 2  # images whose points are matched
# A layer of hidden size 8,192 takes seconds for each hundred tokens.
LONGEST_OF_LARGE, LEFT_OUT = 40, ("a short text", "padding on the right")
# Arguments by which a model gives a part of itself what is added to queries and keys.
PLACES = re.compile(r"position_embeddings$|object_queries|reference_points")

FEATURES = re.compile(r"get_(image|video|audio|speech)_features")

Config = Mapping[str, Any]
Given = dict[str, Any]
Inputs = tuple[str, Given, Tensor | None]  # its name, the arguments, the real tokens


def list_runs(owners: Iterable[Any]) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Yield models, and their methods that make features of one input, and True for mixed inputs.

    Mixed inputs are texts beside an image or a sound; others are texts, or else what a model takes.
    """
    listed = [*owners]
    yield from ((owner, False) for owner in listed)
    for owner in listed:
        names = (name for name in dir(type(owner)) if FEATURES.fullmatch(name))
        yield from ((getattr(owner, name), False) for name in names)
    yield from ((owner, True) for owner in listed)


def read_given(inputs: Mapping[str, Any]) -> Inputs:
    """Return a caller's inputs in float64, with their real tokens where a mask is of all tokens."""
    wide = tree_map(lambda x: x.double() if _is_float(x) else x, dict(inputs))
    mask = None if "decoder_input_ids" in inputs else inputs.get("attention_mask")
    real = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    return "the inputs given", wide, real


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def list_inputs(run: Any, *, is_large: bool, is_mixed: bool) -> Iterator[Iterator[Inputs]]:
    """Yield groups of inputs of `list_runs`; a later group is for one that fails on those."""
    model = getattr(run, "__self__", run)
    parameters = inspect.signature(model.forward if run is model else run).parameters
    takes, config = list(parameters), model.config.to_dict()
    if any(PLACES.search(name) for name in takes):
        return
    more: Given = {name: draw(config) for name, draw in _BESIDE.items() if name in takes}
    is_picture = "pixel_values" in takes and parameters["pixel_values"].default is inspect._empty
    forms = [] if is_picture else [name for name in ("input_ids", "inputs_embeds") if name in takes]
    for form in [] if is_mixed else forms:
        texts = _list_texts(model, takes, form, longest=LONGEST_OF_LARGE if is_large else LONG)
        kept = (each for each in texts if not is_large or each[0] not in LEFT_OUT)
        yield ((name, more | given, real) for name, given, real in kept)
    if is_mixed is not bool(forms):
        return
    if forms or is_picture or "decoder_input_ids" in takes:
        _, text, _ = next(_list_texts(model, takes, "input_ids", longest=SHORT))
        more |= text
    others = [*_list_pictures(config, takes), *_list_sounds(config, takes)]
    if "encoder_hidden_states" in takes and not forms:
        more |= _give_source(config)
    if more and not forms:
        others.append(("features", {}))
        if "context" in more and "attention_mask" in takes:
            more["attention_mask"] = torch.ones(BATCH, SOURCE, dtype=torch.long)
    yield ((name, more | given, None) for name, given in others)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(), dtype=torch.float64)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def find_field(config: Config, *names: str) -> Any:
    """Return the first of these fields of a config or of a part of it; None if there is none."""
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    stated = (config[name] for name in names if config.get(name) is not None)
    deeper = (find_field(part, *names) for part in parts)
    return next((x for each in (stated, deeper) for x in each if x is not None), None)


def _size(config: Config, usual: int, *names: str, at: int = -1) -> int:
    """Return the number in the first of these fields, or in its list."""
    size = find_field(config, *names)
    size = size[at] if isinstance(size, list | tuple) and size else size
    return size if isinstance(size, int) and size > 0 else usual


def _width(config: Config) -> int:
    return _size(config, 1, "hidden_size", "d_model")


def _list_places() -> Tensor:
    """Return the row and the column of each patch of an image, (patches, 2)."""
    return torch.cartesian_prod(torch.arange(EDGE), torch.arange(EDGE))


# Arguments that some classes need beside text, an image or a sound -> values for them.
_BESIDE: dict[str, Callable[[Config], Any]] = {
    "visual_feats": lambda config: _draw(BATCH, REGIONS, _size(config, 1, "visual_feat_dim")),
    "visual_pos": lambda config: _draw(BATCH, REGIONS, _size(config, 4, "visual_pos_dim")),
    "spatial_shapes": lambda _: torch.full((BATCH, 2), EDGE),
    "pixel_attention_mask": lambda _: torch.ones(BATCH, EDGE**2, dtype=torch.long),
    "pixel_position_ids": lambda _: _list_places().expand(BATCH, -1, -1),
    "merge_sizes": lambda _: torch.ones(1, dtype=torch.long),
    "context": lambda config: _draw(BATCH, SOURCE, _width(config)),
    "query_embeds": lambda config: _draw(BATCH, SHORT, _width(config)),
    "latents": lambda config: _draw(BATCH, _width(config), SHORT),
    "hidden_states": lambda config: _draw(BATCH, SHORT, _width(config)),
}


# Images in one row of patches: frames, rows and columns of each.
_PACKED = {
    f"{EDGE} columns": [[1, EDGE, EDGE]],
    f"{2 * EDGE} columns": [[1, EDGE, 2 * EDGE]],
    "a video and an image": [[FRAMES, EDGE, 2 * EDGE], [1, 2 * EDGE, EDGE]],
}


def _list_pictures(config: Config, takes: list[str]) -> Iterator[tuple[str, Given]]:
    sizes = "image_size", "input_size", "img_size"
    high, wide = (_size(config, 64, *sizes, at=at) for at in (0, -1))
    channels = _size(config, 3, "num_channels", "in_channels", "in_chans")
    frames = _size(config, FRAMES, "num_frames", "frames_per_clip")
    edge = _size(config, 16, "patch_size", "spatial_patch_size")
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in takes), None)
    if grid is not None and "input_ids" not in takes:  # images as rows of patches
        name = "pixel_values" if "pixel_values" in takes else "hidden_states"
        deep = _size(config, 1, "temporal_patch_size", "patch_temporal")
        for title, images in _PACKED.items():
            thw = torch.tensor(images)
            patches = int(thw.prod(1).sum())
            patch = channels, edge, edge
            for shape in ((patches, deep * prod(patch)), (patches, *patch), (1, patches, *patch)):
                yield title, {name: _draw(*shape), grid: thw}
    for name in ("pixel_values", "pixel_values_videos", "image"):
        if name not in takes:
            continue
        if "spatial_shapes" in takes or "pixel_position_ids" in takes:
            yield "patches", {name: _draw(BATCH, EDGE**2, channels * edge**2)}
        # Pixtral joins images to one sequence.
        batch = 1 if config.get("model_type") == "pixtral" else BATCH
        yield "an image", {name: _draw(batch, channels, high, wide)}
        yield "a video", {name: _draw(BATCH, frames, channels, high, wide)}
        if frames != PAIR and "input_ids" not in takes:
            # Equal images have as many points, so that none is padding.
            pair = _draw(1, 1, channels, high, wide).expand(BATCH, PAIR, -1, -1, -1)
            yield "two images", {name: pair}
    if "flattened_patches" in takes:
        width = _size(config, _width(config), "patch_embed_hidden_size")
        rows = torch.cat(
            [(_list_places() + 1.0).expand(BATCH, -1, -1), _draw(BATCH, EDGE**2, width)], -1
        )
        yield "patches", {"flattened_patches": rows}


def list_coordinates(config: Config, image: Tensor, x: Tensor) -> Tensor | None:
    """Return row and column of each token of an image, (2, batch, tokens); None without a plane.

    DINOv3 takes 2 pi times the centre of a patch, from -1 to 1, and 0 for the tokens before the
    patches. Pixtral counts, and joins images to one sequence.
    """
    order, patch = PLANES.get(config.get("model_type") or ""), config.get("patch_size")
    if order is None or not isinstance(patch, int):
        return None
    sides = [torch.arange(n // patch) for n in image.shape[-2:]]
    if order == "halves":
        sides = [2 * pi * (2 * (side.float() + 0.5) / len(side) - 1) for side in sides]
    grid = torch.stack(torch.meshgrid(*sides, indexing="ij")).flatten(1)
    if order == "alternating":
        grid = grid.repeat(1, x.shape[1] // grid.shape[1])
    first = grid.new_zeros(2, x.shape[1] - grid.shape[1])
    return torch.cat((first, grid), 1)[:, None].expand(-1, len(x), -1)


def _list_sounds(config: Config, takes: list[str]) -> Iterator[tuple[str, Given]]:
    bins = _size(config, 80, "num_mel_bins", "feature_size")
    frames = 2 * _size(config, 200, "max_source_positions")
    frames = _size(config, frames, "max_length") if "input_values" in takes else frames
    masks = [name for name in ("input_features_mask", "padding_mask") if name in takes]
    for name in ("input_values", "input_features"):
        if name not in takes:
            continue
        seen: Given = {mask: torch.ones(BATCH, frames, dtype=torch.long) for mask in masks}
        yield "a wave", {name: _draw(BATCH, WAVE)}
        yield "a wave of one channel", {name: _draw(BATCH, 1, WAVE)}
        yield "a spectrum", {name: _draw(BATCH, bins, frames)} | seen
        yield "frames", {name: _draw(BATCH, frames, bins)} | seen
        if "feature_lens" in takes:
            lengths = {"feature_lens": torch.tensor([48]), "aftercnn_lens": torch.tensor([24])}
            given = {n: x for n, x in lengths.items() if n in takes}
            yield "a sound of 48 frames", {name: _draw(bins, 48)} | given


def _give_ids(x: Tensor, takes: list[str]) -> Given:
    names = (f"{side}input_ids" for side in ("", "decoder_"))
    return {name: x for name in names if name in takes}


def _give_source(config: Config) -> Given:
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "cross_hidden_size")
    width = next(filter(None, map(config.get, names)), _width(config))
    return {"encoder_hidden_states": _draw(BATCH, SOURCE, width)}


def _list_texts(model: Any, takes: list[str], form: str, *, longest: int) -> Iterator[Inputs]:
    config = model.config.to_dict()
    sections = (getattr(module, "mrope_section", None) for module in model.modules())
    axes = max((len(each) for each in sections if isinstance(each, list)), default=0)
    most = config.get("max_position_embeddings") or config.get("n_positions") or longest
    long = min(longest, most - LATE if most > 2 * LATE else most)
    short = min(SHORT, long)
    ids = _draw_ids(config, long)

    def give(x: Tensor, real: Tensor | None = None) -> Given:
        inputs: Given = {"use_cache": False} if "use_cache" in takes else {}
        if form == "input_ids":
            inputs |= _give_ids(x, takes)
        for side in ("", "decoder_"):
            if real is not None and f"{side}attention_mask" in takes:
                inputs[f"{side}attention_mask"] = real.long()
        if form == "inputs_embeds":
            inputs[form] = _draw(*x.shape, _width(config))
        if "bbox" in takes:
            corner = torch.randint(0, 40, (*x.shape, 2), generator=_generator())
            inputs["bbox"] = torch.cat([corner, corner + LATE], -1)
        return inputs

    yield "a short text", give(ids[:, :short]), None
    yield "a long text", give(ids), None
    if "attention_mask" in takes:
        for side in ("left", "right"):
            real = torch.ones_like(ids, dtype=torch.bool)
            hidden = slice(0, PADDING) if side == "left" else slice(long - PADDING, long)
            real[0, hidden] = False
            yield f"padding on the {side}", give(ids, real), real
    if "encoder_hidden_states" in takes:
        yield "a source", give(ids[:, :short]) | _give_source(config), None
    if "position_ids" in takes and "decoder_input_ids" not in takes:
        late = torch.arange(LATE, LATE + short).expand(BATCH, -1)
        yield "late positions", give(ids[:, :short]) | {"position_ids": late}, None
    if axes:
        places = torch.randint(LONG, (axes, BATCH, short), generator=_generator())
        yield f"positions of {axes} axes", give(ids[:, :short]) | {"position_ids": places}, None


def _draw_ids(config: Config, length: int) -> Tensor:
    special = {str(n) for name, n in config.items() if name.endswith("token_id")}
    rows = _size(config, 100, "vocab_size")
    usual = torch.tensor([n for n in range(min(rows, 1000)) if str(n) not in special])
    return usual[torch.randint(len(usual), (BATCH, length), generator=_generator())]
