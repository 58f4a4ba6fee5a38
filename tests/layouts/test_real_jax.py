"""Layers of JAX and of Keras. They are no part of the development environment: on request only,

pip install -e ".[dev,jax]" && python -m pytest tests/layouts/test_real_jax.py

Gemma's first release runs beside them: pip install --no-deps gemma-llm. What runs with TensorFlow 1
or is no package is written after its source, and needs none of these.
"""

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Mask, Rotary
from headwise.layers import QKNorm
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs

# What these libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, OUT = 40, 12, 3, 10, 7, 44
SINGLE = torch.finfo(torch.float32).eps  # of the angles in the layer
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


def gemma(kv_heads: int) -> Real:
    """Of the first release, which runs one kv head, or as many as heads."""
    jax = jax_in_double()
    library = pytest.importorskip("gemma.modules")
    layer = library.Attention(HEADS, kv_heads, EMBED, HEAD_DIM)
    x = inputs(EMBED)
    places = torch.arange(LENGTH).expand(BATCH, -1).numpy()
    mask = CAUSAL.expand(BATCH, -1, -1).numpy()
    params = layer.init(jax.random.key(0), x.numpy(), places, None, mask)["params"]
    state = drawn({f"{name}.w": p["w"].shape for name, p in params.items()})
    tree = {name: {"w": state[f"{name}.w"].numpy()} for name in params}
    _, outputs = layer.apply({"params": tree}, x.numpy(), places, None, mask)
    options = {"num_heads": HEADS, "num_kv_heads": kv_heads, "scale": None, "rotary": Rotary()}
    return Real(state, x, tensor_of(outputs), options, Mask.causal(), SINGLE)


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
    """Attention of (batch, length, heads, head_dim), where kv heads may be fewer."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(~CAUSAL, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def phases() -> Tensor:
    turns = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    return torch.outer(torch.arange(LENGTH, dtype=torch.float64), turns)[:, None]


def turn_neighbours(x: Tensor) -> Tensor:
    a, b, cos, sin = x[..., ::2], x[..., 1::2], phases().cos(), phases().sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def turn_halves(x: Tensor) -> Tensor:
    (a, b), cos, sin = x.chunk(2, dim=-1), phases().cos(), phases().sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def easylm() -> Real:
    width = {"wq": HEADS, "wk": KV_HEADS, "wv": KV_HEADS}
    state = drawn({f"{name}.kernel": (EMBED, n * HEAD_DIM) for name, n in width.items()})
    state |= drawn({"wo.kernel": (HEADS * HEAD_DIM, EMBED)})
    x = inputs(EMBED)
    q, k, v = ((x @ state[f"{name}.kernel"]).unflatten(-1, (-1, HEAD_DIM)) for name in width)
    outputs = attend(turn_neighbours(q), turn_neighbours(k), v).flatten(2) @ state["wo.kernel"]
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "rotary": Rotary()}
    return Real(state, x, outputs, options, Mask.causal(), SINGLE)


def gemma3() -> Real:
    state = drawn(
        {
            "q_einsum.w": (HEADS, EMBED, HEAD_DIM),
            "kv_einsum.w": (2, KV_HEADS, EMBED, HEAD_DIM),
            "attn_vec_einsum.w": (HEADS, HEAD_DIM, EMBED),
            "_query_norm.scale": (HEAD_DIM,),
            "_key_norm.scale": (HEAD_DIM,),
        }
    )
    x = inputs(EMBED)
    q = torch.einsum("btd,ndh->btnh", x, state["q_einsum.w"])
    k, v = torch.einsum("bsd,ckdh->cbskh", x, state["kv_einsum.w"])
    q, k = (
        turn_halves(
            t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + state[f"{name}.scale"])
        )
        for t, name in ((q, "_query_norm"), (k, "_key_norm"))
    )
    outputs = torch.einsum("btnh,nhd->btd", attend(q, k, v), state["attn_vec_einsum.w"])
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "scale": None, "rotary": Rotary()}
    options["qk_norm"] = QKNorm(one_plus=True)
    return Real(state, x, outputs, options, Mask.causal(), SINGLE)


def bert_of_tensorflow() -> Real:
    wide = HEADS * HEAD_DIM
    names = ("self/query", "self/key", "self/value", "output/dense")
    state = drawn({f"{name}/kernel": (wide, wide) for name in names})
    state |= drawn({f"{name}/bias": (wide,) for name in names})
    x = inputs(wide)
    q, k, v = (
        (x @ state[f"{name}/kernel"] + state[f"{name}/bias"]).unflatten(-1, (HEADS, HEAD_DIM))
        for name in names[:3]
    )
    heads = attend(q, k, v, is_causal=False).flatten(2)
    outputs = heads @ state["output/dense/kernel"] + state["output/dense/bias"]
    return Real(state, x, outputs, {"num_heads": HEADS})


def gpt2_of_tensorflow() -> Real:
    wide = HEADS * HEAD_DIM
    state = drawn({"c_attn/w": (1, wide, 3 * wide), "c_proj/w": (1, wide, wide)})
    state |= drawn({"c_attn/b": (3 * wide,), "c_proj/b": (wide,)})
    x = inputs(wide)
    split = (x @ state["c_attn/w"][0] + state["c_attn/b"]).split(wide, dim=-1)
    q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)) for t in split)
    outputs = attend(q, k, v).flatten(2) @ state["c_proj/w"][0] + state["c_proj/b"]
    return Real(state, x, outputs, {"num_heads": HEADS}, Mask.causal())


WRITTEN = {
    "easylm": easylm,
    "gemma3-jax": gemma3,
    "bert-tensorflow": bert_of_tensorflow,
    "gpt2-tensorflow": gpt2_of_tensorflow,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_after_its_source(name: str) -> None:
    assert_same_function(name, WRITTEN[name]())


def tensor_of(array: Any) -> Tensor:
    return torch.tensor(array.__array__())


CASES = {
    "keras": keras,
    "keras-gqa": keras_gqa,
    "flax": flax,
    "haiku": haiku,
    "equinox": equinox,
    "gemma-jax": lambda: gemma(1),
    "gemma-jax-mha": lambda: gemma(HEADS),
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
