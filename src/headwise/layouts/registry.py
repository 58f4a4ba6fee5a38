"""Registry of layouts by name: the catalogue, and the layouts that a user adds."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from headwise.errors import OptionError
from headwise.function.spec import SAM, SHAW, SWIN, SWIN_2, TRANSFORMER_XL, WAVLM, Other
from headwise.layouts import catalogue
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule, find_modules, find_unlisted_tensors_of_module
from headwise.support.text import describe_value

_registered: dict[str, Layout] = {}


def layouts_by_name() -> dict[str, Layout]:
    return {member.name: member for family in layouts_by_family().values() for member in family}


def layouts_by_family() -> dict[str, tuple[Layout, ...]]:
    """Return all layouts by family: the first docstring line of each catalogue file."""
    registered = {"Registered here.": tuple(_registered.values())} if _registered else {}
    return {**catalogue_by_family(), **registered}


def layout(name: str | Layout) -> Layout:
    """Return the layout of that name; a `Layout` is returned as it is.

    Raises:
        OptionError: no layout has this name.
    """
    if isinstance(name, Layout):
        return name
    known = layouts_by_name()
    if name not in known:
        word = str(name).lower()  # also of a value that is no name
        near = [other for other in known if word in other]
        similar = get_close_matches(word, known, n=4, cutoff=0.5)
        near += [other for other in similar if other not in near]
        raise OptionError(
            saw=f"no layout is named {describe_value(name)}",
            needed=f"one of {len(known)}" + (f"; near are {', '.join(near)}" if near else ""),
            do="headwise layouts lists them; register adds one",
        )
    return known[name]


def register(new: Layout) -> Layout:
    """Add a layout under its name, for this process, and return it.

    `convert`, `detect` and `Attention.from_layout` then take the name.

    Raises:
        OptionError: the name is taken, or not in kebab case.
    """
    if new.name in layouts_by_name() or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", new.name):
        raise OptionError(
            saw=f"the name {new.name!r}",
            needed="a name in kebab case that no layout has yet",
            do="choose another one",
        )
    _registered[new.name] = new
    return new


def find_modules_of_each(names: Iterable[str]) -> list[tuple[Layout, list[NamedModule]]]:
    """Return each layout with its modules in a checkpoint, which is kept for the next look."""
    return _list_modules((*names,), len(_registered))


@lru_cache(maxsize=1)
def _list_modules(names: tuple[str, ...], _: int) -> list[tuple[Layout, list[NamedModule]]]:
    return [(each, find_modules(each, names)) for each in layouts_by_name().values()]


@lru_cache(maxsize=1)
def catalogue_by_family() -> dict[str, tuple[Layout, ...]]:
    by_family: dict[str, tuple[Layout, ...]] = {}
    names: set[str] = set()
    for entry in iter_modules(catalogue.__path__):
        module = import_module(f"{catalogue.__name__}.{entry.name}")
        for member in module.LAYOUTS:
            assert member.name not in names, f"two layouts are named {member.name}"
            names.add(member.name)
        by_family[(module.__doc__ or "").partition("\n")[0]] = tuple(module.LAYOUTS)
    return by_family


UNQUANTISED = "take the checkpoint that was quantised, in bfloat16 or float32"


class Obstacle(NamedTuple):
    """A reason, and what to do about it."""

    reason: str
    do: str


# A pattern of tensor names -> the reason and the advice; the first that a name fits is given.
QUANTISED = {
    r"\.g_idx$": Obstacle("its weights are quantised by GPTQ", UNQUANTISED),
    r"\.qzeros$": Obstacle("its weights are quantised by AWQ or GPTQ", UNQUANTISED),
    r"\.(absmax|quant_map|SCB|quant_state\.bitsandbytes__\w+)$": Obstacle(
        "its weights are quantised by bitsandbytes",
        f"load it with transformers, and save model.dequantize(); or {UNQUANTISED}",
    ),
    r"\.(weight_scale(_inv)?|scale_weight)$": Obstacle(
        "its weights are 8-bit or 4-bit numbers with scales beside them", UNQUANTISED
    ),
}
OTHERS = {
    r"lora_(A|B|embedding)": Obstacle(
        "it holds the adapters of peft, without the weights that they change",
        "PeftModel.from_pretrained(model, path).merge_and_unload().save_pretrained(folder)",
    ),
    r"\.(self_attn|attention)\.(indexer|q_gate_proj)\.": Obstacle(
        "its attention chooses keys, or has gates of the latent of queries",
        "headwise scan runs such a model; its weights have no layout",
    ),
}
AS_DENSE_BIAS = (
    "headwise scan runs such a model; for one layer, compute the term and give it to "
    'AttentionMatrix as ScoreBias.dense (docs/migrating.md, "Relative positions")'
)
# A pattern of tensor names in an attention -> what they add to its scores, which no layer has.
SCORES = {
    r"(^|\.)(linear_pos|pos_bias_[uv]|bias_[uv]|r_[wr]_bias|r_net|r_kernel|relative_k_proj"
    r"|relative_position_embedding\.pos_proj)\b": TRANSFORMER_XL,
    r"(^|\.)(distance_embedding|rel_pos_emb)\b": SHAW,
    r"(^|\.)(cpb_mlp|continuous_position_bias_mlp)\b": SWIN_2,
    r"(^|\.)relative_position_bias_table$": SWIN,
    r"(^|\.)rel_pos_[hw]$": SAM,
    r"(^|\.)gru_rel_pos_(const|linear)\b": WAVLM,
    r"(^|\.)rel_logits_proj\b": Other("a table of distances for each query"),
}


def find_obstacle(names: Mapping[str, Any] | Collection[str]) -> Obstacle | None:
    """Return the reason why no layout fits tensors, or None where none is known."""
    known = find_quantisation(names) or _find_by_name(names, OTHERS)
    if known is None and (form := find_score_form(names)) is not None:
        return Obstacle(describe_score_form(*form), AS_DENSE_BIAS)
    if known is None and isinstance(names, Mapping):
        known = _find_stacked_layers(names)
    unlisted = iter(()) if known else _unlisted_tensors(names)
    layout, strays = min(unlisted, key=lambda pair: len(pair[1]), default=("", []))
    if not strays:
        return known
    more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
    reason = f"its names would be those of {layout}, but for `{strays[0]}`{more}"
    return Obstacle(reason, "leave these tensors out if they are no part of attention")


def find_score_form(names: Iterable[str]) -> tuple[Other, str] | None:
    """Return what tensors add to the scores that no layer has, with the name that tells it."""
    names = list(names)
    for pattern, form in SCORES.items():
        if name := next((name for name in names if re.search(pattern, name)), None):
            return form, name
    return None


def describe_score_form(form: Other, name: str) -> str:
    return f"its scores have {form.name}, which no layer here has, as `{name}` shows"


def find_quantisation(names: Collection[str]) -> Obstacle | None:
    if any(
        f"{name}.scales" in names and f"{name}.biases" in names
        for name in (n.removesuffix(".weight") for n in names if n.endswith(".weight"))
    ):
        do = f"mlx_lm.convert --dequantize, or {UNQUANTISED}"
        return Obstacle("its weights are quantised by MLX", do)
    return _find_by_name(names, QUANTISED)


def _find_by_name(names: Collection[str], patterns: Mapping[str, Obstacle]) -> Obstacle | None:
    for pattern, obstacle in patterns.items():
        if name := next((name for name in names if re.search(pattern, name)), None):
            return obstacle._replace(reason=f"{obstacle.reason}, as `{name}` shows")
    return None


def _find_stacked_layers(headers: Mapping[str, Any]) -> Obstacle | None:
    shapes = {name: tuple(header.shape) for name, header in headers.items()}
    for layout, modules in find_modules_of_each(headers):
        for tensors in (module.tensors for module in modules):
            axes = {name: len(layout.patterns[local].axes) for name, local in tensors.items()}
            more = {len(shapes[name]) - axes[name] for name in axes}
            if more == {1} and layout.required <= {*tensors.values()}:
                name = next(iter(tensors))
                return Obstacle(
                    f"its names are those of {layout.name}, and each tensor has one axis more, for "
                    f"stacked layers: `{name}` is of shape {shapes[name]}",
                    "give one layer: {name: x[layer] for name, x in tensors.items()}; or x[:, i]",
                )
    return None


def _unlisted_tensors(names: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    for layout, modules in find_modules_of_each(names):
        if any(layout.required <= {*module.tensors.values()} for module in modules):
            strays = [n for m in modules for n in find_unlisted_tensors_of_module(m, layout)]
            if strays:
                yield layout.name, strays
