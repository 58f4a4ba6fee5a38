"""Layers of JAX and of Keras. They are no part of the development environment: on request only,

pip install -e ".[dev,jax]" && python -m pytest tests/layouts/test_real_jax.py
"""

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Mask
from tests.layouts.real import LENGTH, Real, assert_same_function, inputs

# What these libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, OUT = 40, 12, 3, 10, 7, 44
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights for which attention is neither uniform nor saturated."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 / EMBED**0.5
        for name, shape in shapes.items()
    }


def jax_in_double() -> ModuleType:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    return jax


def keras() -> Real:
    layer = keras_library().layers.MultiHeadAttention(
        HEADS, HEAD_DIM, value_dim=VALUE_DIM, output_shape=OUT, dtype="float64"
    )
    layer.build((None, LENGTH, EMBED), (None, LENGTH, EMBED))
    return of_keras(layer, {"num_heads": HEADS})


def keras_gqa() -> Real:
    layer = keras_library().layers.GroupQueryAttention(HEAD_DIM, HEADS, KV_HEADS, dtype="float64")
    layer.build((None, LENGTH, EMBED), (None, LENGTH, EMBED))
    return of_keras(layer, {"num_heads": HEADS, "num_kv_heads": KV_HEADS})


def keras_library() -> ModuleType:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")


def of_keras(layer: Any, options: dict[str, Any]) -> Real:
    variables = {v.path.split("/", 1)[1]: v for v in layer.trainable_variables}
    state = drawn({name: tuple(v.shape) for name, v in variables.items()})
    for name, variable in variables.items():
        variable.assign(state[name].numpy())
    x = inputs(EMBED)
    outputs = layer(x, x, use_causal_mask=True)
    # Keras makes a tensor of the scale in float32, then casts it.
    unit = torch.finfo(torch.float32).eps
    return Real(state, x, outputs.detach().cpu(), options, mask=Mask.causal(), unit=unit)


def flax() -> Real:
    jax = jax_in_double()
    flax = pytest.importorskip("flax")
    linen = pytest.importorskip("flax.linen")
    layer = linen.MultiHeadDotProductAttention(
        HEADS,
        qkv_features=HEADS * HEAD_DIM,
        out_features=OUT,
        dtype=jax.numpy.float64,
        param_dtype=jax.numpy.float64,
    )
    x = inputs(EMBED)
    params = layer.init(jax.random.key(0), x.numpy())["params"]
    shapes = flax.traverse_util.flatten_dict(params, sep=".")
    state = drawn({name: p.shape for name, p in shapes.items()})
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    tree = flax.traverse_util.unflatten_dict(arrays, sep=".")
    outputs = layer.apply({"params": tree}, x.numpy(), mask=CAUSAL[None, None].numpy())
    return Real(state, x, tensor_of(outputs), {"num_heads": HEADS}, mask=Mask.causal())


def haiku() -> Real:
    jax = jax_in_double()
    haiku = pytest.importorskip("haiku")

    @haiku.transform
    def layer(x: Any) -> Any:
        attend = haiku.MultiHeadAttention(
            HEADS,
            HEAD_DIM,
            value_size=VALUE_DIM,
            model_size=OUT,
            w_init=haiku.initializers.Constant(0),
            name="it",
        )
        return attend(x, x, x, mask=CAUSAL[None, None].numpy())

    x = inputs(EMBED)
    params = layer.init(jax.random.key(0), x.numpy())
    shapes = {
        f"{module.removeprefix('it/')}/{name}": p.shape
        for module, inner in params.items()
        for name, p in inner.items()
    }
    state = drawn(shapes)
    tree = {
        module: {name: state[f"{module.removeprefix('it/')}/{name}"].numpy() for name in inner}
        for module, inner in params.items()
    }
    outputs = layer.apply(tree, jax.random.key(0), x.numpy())
    return Real(state, x, tensor_of(outputs), {"num_heads": HEADS}, mask=Mask.causal())


def equinox() -> Real:
    jax = jax_in_double()
    equinox = pytest.importorskip("equinox")
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    layer = equinox.nn.MultiheadAttention(
        HEADS,
        EMBED,
        output_size=OUT,
        qk_size=HEAD_DIM,
        vo_size=VALUE_DIM,
        **biases,
        dtype=jax.numpy.float64,
        key=jax.random.key(0),
    )
    names = [
        (f"{part}_proj", name)
        for part in ("query", "key", "value", "output")
        for name in ("weight", "bias")
    ]

    def leaves(tree: Any) -> list[Any]:
        return [getattr(getattr(tree, part), name) for part, name in names]

    shapes = [leaf.shape for leaf in leaves(layer)]
    state = drawn({".".join(name): shape for name, shape in zip(names, shapes, strict=True)})
    layer = equinox.tree_at(leaves, layer, [jax.numpy.asarray(t.numpy()) for t in state.values()])
    x = inputs(EMBED)
    outputs = jax.vmap(lambda x: layer(x, x, x, mask=CAUSAL.numpy()))(jax.numpy.asarray(x.numpy()))
    return Real(state, x, tensor_of(outputs), {"num_heads": HEADS}, mask=Mask.causal())


def tensor_of(array: Any) -> Tensor:
    return torch.tensor(array.__array__())


CASES = {
    "keras": keras,
    "keras-gqa": keras_gqa,
    "flax": flax,
    "haiku": haiku,
    "equinox": equinox,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
