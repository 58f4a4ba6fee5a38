"""Attention modules of a model of transformers: as a cut finds them, and gives them other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.places import Place, find_model_places
from headwise.checkpoints.transformers import cut_classes
from headwise.errors import DeviceError, OptionError
from headwise.function.spec import AttentionSpec, BucketRule, Other
from headwise.function.weights import State
from headwise.layers.attention import Attention
from headwise.layers.conversion import canonical_state, layer_state_dict_from_canonical
from headwise.layouts import registry
from headwise.scanning.call import ORIGINAL, OriginalHeads
from headwise.support.text import list_some
from headwise.surgery.cut import Cut, LayerCut

Counts = tuple[int, int, int]  # heads, kv heads, head_dim
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_key_value_groups")


def stated_counts(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return what the attributes of attention modules count, by their names in transformers."""
    return {
        **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads"), heads),
        **dict.fromkeys(KV_HEADS[:2], kv_heads),
        KV_HEADS[2]: heads // kv_heads,
        **dict.fromkeys(("all_head_size", "inner_dim", "split_size"), heads * head_dim),
    }


class HeadPlaces:
    """The attention modules of a model, by name; its weights may have no values.

    Attributes:
        places: name -> the place of an attention module.
        specs: name -> its function.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: Mapping[str, Tensor] = dict(model.state_dict())
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if to_dict is None:
            raise OptionError(
                saw=f"a {type(model).__name__} without a config",
                needed="a model of transformers",
                do="pass the model that it wraps: model.module"
                if isinstance(getattr(model, "module", None), nn.Module)
                else "cut single layers of headwise: headwise.surgery.cut_layer",
            )
        self.config: dict[str, Any] = dict(to_dict())
        places = find_model_places(model)
        if not places:
            raise OptionError(
                saw=f"{type(model).__name__}, whose attention is in no layout of the catalogue",
                needed="a model of transformers whose model_type the catalogue knows",
                do="cut single layers of headwise: headwise.surgery.cut_layer; headwise layouts "
                "lists the layouts",
            )
        self.places = {place.name: place for place in places}
        # shapes state the functions: a layer with weights is one more copy of each attention
        shapes = {name: x.to("meta") for name, x in self.state.items() if isinstance(x, Tensor)}
        with torch.device("meta"):
            self.specs: Mapping[str, AttentionSpec] = {
                name: _read_function(place, shapes) for name, place in self.places.items()
            }

    def whole(self) -> Cut:
        """Return the cut of all layers that does nothing yet."""
        return Cut(
            {
                name: LayerCut(int(spec.num_heads), int(spec.num_kv_heads))
                for name, spec in self.specs.items()
            }
        )

    def fit(self, cut: Cut) -> Cut:
        """Return the cut as this model's modules can hold it.

        A module whose class has no kv heads gets a copy of them for each head: no output changes.

        Raises:
            OptionError: layers that the model does not have, or heads that its layers share.
        """
        if unknown := [name for name in cut.layers if name not in self.specs]:
            raise OptionError(
                saw=f"a cut of {list_some(unknown)}, which the model does not have",
                needed=f"layers among {list_some([*self.specs])}",
                do="make the cut of this model: headwise.surgery.ModelHeads(model).whole()",
            )
        whole = self.whole().layers
        for stack in self.stacks:
            kept = {name: cut.layers.get(name, whole[name]).origins.query for name in stack}
            if different := [name for name in stack[1:] if kept[name] != kept[stack[0]]]:
                raise OptionError(
                    saw=f"other heads in {list_some(different)} than in {stack[0]}",
                    needed="the same heads in all layers of a stack that share one table of "
                    "distances",
                    do="keep the same heads in each layer, or zero heads in place of taking "
                    "them out",
                )
        layers = dict(cut.layers)
        for name, layer in cut:
            heads, spec = layer.origins, self.specs[name]
            is_full = len(heads.kv) == len(heads.query)
            if is_full or name not in self.places or spec.num_kv_heads != spec.num_heads:
                continue
            modules = modules_of(self.model, self.places[name])
            if not any(hasattr(module, word) for module in modules for word in KV_HEADS):
                layers[name] = layer.expand(len(heads.query))
        return Cut(layers)

    @property
    def stacks(self) -> list[tuple[str, ...]]:
        """Names of the layers that must keep the same heads, each other layer by itself.

        Layers of one stack share a table of distances; in cross attention, one of zeros.
        """
        stacks: dict[tuple[str, ...], list[str]] = {}
        for name in self.specs:
            key: tuple[str, ...] = (name,)
            place = self.places.get(name)
            if place is not None and isinstance(place.layout.function.score_bias, BucketRule):
                key = place.module.place.root, place.module.place.role, "table"
            stacks.setdefault(key, []).append(name)
        return [tuple(names) for names in stacks.values()]


def _read_function(place: Place, state: Mapping[str, Tensor]) -> AttentionSpec:
    spec = place.layer(state, window=None).spec
    if isinstance(spec.score_bias, BucketRule) and "distances" not in (
        place.layout.canonical_tensor_names
    ):
        # MPNet's table of distances is no tensor of an attention, so that no cut changes it
        return replace(spec, score_bias=Other("a table of distances beside the layers"))
    return spec


class ModelHeads(HeadPlaces):
    """The attention modules of a model, by name, as a cut finds them.

    Args:
        model: a model of transformers, or a module made of layers of headwise.

    Attributes:
        layers: name -> a layer of headwise. With such layers, no places are looked for.

    Raises:
        OptionError: no layout for this model; or quantised, adapted or shared weights.
        DeviceError: weights on several devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {
            f"{name}." if name else "": module
            for name, module in model.named_modules()
            if isinstance(module, Attention)
        }
        if self.layers:
            self.model, self.places = model, {}
            self.specs = {name: layer.spec for name, layer in self.layers.items()}
            return
        _require_whole_weights(model)
        _require_plain_weights(dict(model.state_dict()))
        super().__init__(model)
        # A cut of one of two attention modules that share a tensor would cut the other.
        owners: dict[tuple[int, torch.Size], str] = {}
        for name in (name for place in self.places.values() for name in place.module.tensors):
            tensor = self.state[name]
            other = owners.setdefault((tensor.data_ptr(), tensor.shape), name)
            if other != name and tensor.numel():
                raise OptionError(
                    saw=f"{name}, which is the same tensor as {other}",
                    needed="weights that no two layers share",
                    do="give each layer weights of its own: model.layer = copy.deepcopy(...)",
                )

    def original_numbers(self, name: str) -> list[int]:
        """Return the numbers by which a scan names the heads of one attention, in their order."""
        module = self.model.get_submodule(name.rstrip("."))
        original: OriginalHeads | None = vars(module).get(ORIGINAL)
        whole = range(int(self.specs[name].num_heads))
        return [*whole] if original is None else [*original.numbers]

    def canonical(self, name: str) -> State:
        """Return the canonical tensors of one attention."""
        if name in self.layers:
            return canonical_state(self.layers[name], self.layers[name].state_dict())
        return self.places[name].read(self.state)

    def read(self, name: str, cut: Cut) -> State:
        """Return the canonical tensors of one attention after a fitted cut."""
        layer, state = cut.layers.get(name), self.canonical(name)
        return state if layer is None else layer.apply(state, self.specs[name])

    def pack(self, states: Mapping[str, State]) -> dict[str, Tensor]:
        """Return the tensors of layers that are others than the model's, by their names in it."""
        changed: dict[str, Tensor] = {}
        for name, state in states.items():
            if name in self.layers:
                stored = layer_state_dict_from_canonical(state, self.layers[name])
                changed |= {name + local: tensor for local, tensor in stored.items()}
                continue
            place = self.places[name]
            packed = pack_in_memory(place, state, place.sizes(self.state))
            for full, tensor in packed.items():
                before = self.state.get(full)
                if before is None or not torch.equal(before, tensor):
                    changed[full] = tensor
        return changed


def resize(model: nn.Module, heads: HeadPlaces, cut: Cut, changed: Mapping[str, Tensor]) -> None:
    """Give a model the changed tensors, and its attention modules their numbers of heads."""
    for full, tensor in changed.items():
        path, _, local = full.rpartition(".")
        owner: Any = model.get_submodule(path)
        before = getattr(owner, local, None)
        requires_grad = (owner.weight if before is None else before).requires_grad
        setattr(owner, local, nn.Parameter(tensor.detach(), requires_grad=requires_grad))
        if local != "weight":
            continue
        rows, columns = tensor.shape[0], tensor.shape[-1]
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = rows, columns
        elif isinstance(owner, nn.Embedding):
            owner.num_embeddings, owner.embedding_dim = rows, columns
        elif hasattr(owner, "nf"):  # Conv1D of transformers, (in, out)
            owner.nx, owner.nf = rows, columns
    for name, layer in cut:
        before, left = counts_of(heads.specs[name]), layer.origins
        old, new = stated_counts(*before), stated_counts(len(left.query), len(left.kv), before[2])
        for module in modules_of(model, heads.places[name]):
            for attribute in [a for a, n in old.items() if vars(module).get(a) == n]:
                setattr(module, attribute, new[attribute])
            _resize_reading(module, old, new)
        label_heads(model.get_submodule(name.rstrip(".")), layer)


def _resize_reading(module: nn.Module, old: Mapping[str, int], new: Mapping[str, int]) -> None:
    """Change what the code of a module reads elsewhere: in its config, or as its width."""
    names = {*inspect.unwrap(type(module).forward).__code__.co_names}
    width, config = old["inner_dim"], getattr(module, "config", None)
    if "embed_dim" in names and vars(module).get("embed_dim") == width:  # of all heads together
        vars(module)["embed_dim"] = new["inner_dim"]
    read = [a for a in names & old.keys() - vars(module).keys() if hasattr(config, a)]
    if counts := {a: new[a] for a in sorted(read) if getattr(config, a) == old[a]}:
        cut_classes().resize(module, {"config": counts})


def label_heads(module: nn.Module, cut: LayerCut) -> None:
    """Let a module state the original numbers of its heads, which a scan takes as labels."""
    whole = OriginalHeads(cut.num_heads, tuple(range(cut.num_heads)))
    before: OriginalHeads = vars(module).get(ORIGINAL, whole)
    left = tuple(before.numbers[head] for head in cut.origins.query)
    vars(module)[ORIGINAL] = OriginalHeads(before.total, left)


def counts_of(spec: AttentionSpec) -> Counts:
    """Return heads, kv heads and head_dim."""
    return int(spec.num_heads), int(spec.num_kv_heads), int(spec.head_dim)


def pack(place: Place, state: State, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the tensors that a module stores, by their full names.

    ``sizes`` are those of the module before the cut.
    """
    width = {"rotary_width": sizes["rotary_width"]} if "rotary_width" in sizes else {}
    stored = place.layout.pack(state, **width)
    return {place.name + local: tensor for local, tensor in stored.items()}


def pack_in_memory(place: Place, state: State, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the tensors as `pack` does, with a bias of the output projection in any layout.

    A module in memory can hold one that its class has not.
    """
    if "bo" not in state or "bo" in place.layout.canonical_tensor_names:
        return pack(place, state, sizes)
    weight = next(local for local, p in place.layout.patterns.items() if "wo" in p.tensors)
    packed = pack(place, {name: x for name, x in state.items() if name != "bo"}, sizes)
    return packed | {f"{place.name}{weight.removesuffix('weight')}bias": state["bo"]}


def modules_of(model: nn.Module, place: Place) -> Iterable[nn.Module]:
    """Yield the module of an attention, and the modules inside it."""
    path = place.name.rstrip(".")
    owners = {name.rpartition(".")[0] for name in place.module.tensors}
    yield from model.get_submodule(path).modules()
    for owner in owners - {path}:  # a layout may lie in a block, beside other modules
        parent = owner.rpartition(".")[0]
        if not parent.startswith(path):
            yield model.get_submodule(parent)


def _require_whole_weights(model: nn.Module) -> None:
    """Raise for the weights of FSDP and of tensor parallelism, a part of which each process has."""
    shards = (n for n, x in model.named_parameters() if hasattr(x, "full_tensor"))
    wrapped = (n for n, each in model.named_modules() if hasattr(each, "_fsdp_wrapped_module"))
    if (first := next(chain(shards, wrapped), None)) is not None:
        raise OptionError(
            saw=f"a model whose weights are divided among processes, such as {first or 'all'}",
            needed="whole weights in one process",
            do="gather them into a copy that is not wrapped: copy.load_state_dict("
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)))",
        )


def _require_plain_weights(state: Mapping[str, Tensor]) -> None:
    """Raise for adapters, quantised weights, and weights on several devices."""
    adapted = [name for name in state if "lora_" in name or ".base_layer." in name]
    if adapted:
        raise OptionError(
            saw=f"a model with adapters, such as {adapted[0]}",
            needed="weights of its own",
            do="merge the adapters first: model = model.merge_and_unload()",
        )
    quantised = registry.find_quantisation(state.keys())
    weights = {n: x for n, x in state.items() if n.endswith(("weight", "_packed_params"))}
    packed = [name for name, x in weights.items() if not _is_real(x)]
    if quantised is not None or packed:
        raise OptionError(
            saw=f"a model with quantised weights: {quantised.reason}"
            if quantised
            else f"a model with quantised weights, such as {packed[0]}",
            needed="weights in floating point",
            do="load the model before quantisation, cut it, and quantise it then",
        )
    devices = sorted({str(x.device) for x in state.values() if isinstance(x, Tensor)})
    if len(devices) > 1 or devices == ["meta"]:
        raise DeviceError(
            saw=f"a model on {', '.join(devices)}",
            needed="all weights on one device that holds them",
            do='load it on one device: device_map="cpu"',
        )


def _is_real(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
