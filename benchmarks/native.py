"""Benchmarks of the native layer against the layers of other libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.agreement import require_agreement
from benchmarks.case import ONE_TOKEN, SHAPES, Case, Make, Shape, step
from headwise import Attention, Mask, Rotary
from headwise.layers.linear import apply_linear
from headwise.support import private_torch
from headwise.support.processor import CPU_INFO, product_here

NO_BIAS: dict[str, Any] = dict.fromkeys(["q_bias", "k_bias", "v_bias", "out_bias"], False)
PADDED = (32, 512, 512, 8)
# The share of real tokens, and the limits in inference and in training.
FILLS = ((0.28, 0.22, 0.30), (0.62, 0.66, 0.75))
LONGEST, LEFT = 16384, 256
TOKENS = (1, 8, 64, 512, 4096)


def _self_attention(shape: Shape, *, training: bool) -> Case:
    batch, length, embed_dim, heads = shape
    ours = Attention(embed_dim, heads, **NO_BIAS)
    x = torch.randn(batch, length, embed_dim)
    others: dict[str, nn.Module] = {
        "torch": peers.Torch(ours),
        "Llama": peers.Llama(ours, length=length),
        "x-transformers": peers.XTransformers(ours),
    }
    ours_step = step(ours, ours, x, training=training)
    steps = {name: step(layer, layer, x, training=training) for name, layer in others.items()}
    require_agreement(ours, x[-1:], [run()[-1:] for run in (ours_step, *steps.values())])
    return Case(f"native, {_mode(training)}", str(shape), ours_step, {**steps}, 1.0)


def _one_token(*, training: bool) -> Case:
    """Compare with torch's layer, whose packed product of one token is faster than three."""
    batch, length, embed_dim, heads = ONE_TOKEN
    ours = Attention(embed_dim, heads)
    peer = peers.Torch(ours)
    x = torch.randn(batch, length, embed_dim)
    ours_step, peer_step = (step(layer, layer, x, training=training) for layer in (ours, peer))
    require_agreement(ours, x, [run() for run in (ours_step, peer_step)])
    name = f"native, one token, {_mode(training)}"
    return Case(name, str(ONE_TOKEN), ours_step, {"torch": peer_step}, 1.0)


def _bfloat16(shape: Shape) -> Case:
    """Compare with our own layer in float32; the fused kernel may be no faster in bfloat16."""
    batch, length, embed_dim, heads = shape
    ours = Attention(embed_dim, heads)
    halved = Attention(embed_dim, heads, dtype=torch.bfloat16)
    x = torch.randn(batch, length, embed_dim)
    our_step = step(halved, halved, x.bfloat16(), training=False)
    whole_step = step(ours, ours, x, training=False)
    has_instructions = CPU_INFO.is_file() and "avx512_bf16" in CPU_INFO.read_text()
    limit = 0.5 if has_instructions else None
    return Case("native, bfloat16, inference", str(shape), our_step, {"float32": whole_step}, limit)


def _padded(fill: float, limit: float, *, training: bool) -> Case:
    batch, length, embed_dim, heads = PADDED
    ours = Attention(embed_dim, heads)
    peer = peers.Torch(ours)
    n = lengths(fill, batch=batch, length=length)
    mask, padding = Mask.lengths(queries=n, keys=n), torch.arange(length) >= n[:, None]
    x = torch.randn(batch, length, embed_dim)
    ours_step = step(ours, partial(ours, mask=mask), x, training=training)
    peer_step = step(peer, partial(peer, padding=padding), x, training=training)
    last = slice(-1, None), slice(int(n[-1]))
    require_agreement(ours, x[last], [run()[last] for run in (ours_step, peer_step)])
    real = int(n.sum()) / (batch * length)
    name = f"{PADDED}, {real:.4f} real"
    return Case(f"native, padded, {_mode(training)}", name, ours_step, {"torch": peer_step}, limit)


def lengths(fill: float, *, batch: int, length: int) -> Tensor:
    """Draw lengths uniformly around ``fill * length`` from a fixed seed, with this mean."""
    spread = 0.9 * min(fill, 1 - fill)
    drawn = torch.rand(batch, generator=torch.Generator().manual_seed(0))
    n = ((fill + spread * (2 * drawn - 1)) * length).long()
    missing = round(fill * batch * length) - int(n.sum())
    n += missing // batch
    n[n.argsort()[batch // 2]] += missing % batch
    return n


def _decode() -> Case:
    batch, held, embed_dim, heads, kv_heads = 8, 4096, 4096, 32, 8
    ours = Attention(embed_dim, heads, num_kv_heads=kv_heads, rotary=Rotary(), **NO_BIAS)
    llama = peers.Llama(ours, first=held, length=1)
    k, v = (torch.randn(batch, kv_heads, held, ours.head_dim) for _ in range(2))
    # Each call appends one token to both caches.
    our_cache, their_cache = ours.cache(batch=batch, length=held + 512), llama.cache(k, v)
    our_cache.append(k, v)
    x = torch.randn(batch, 1, embed_dim)
    ours_step = step(ours, partial(ours, mask=Mask.causal(), cache=our_cache), x, training=False)
    peer_step = step(llama, partial(llama, cache=their_cache), x, training=False)
    outputs = [run()[-1:] for run in (ours_step, peer_step)]
    require_agreement(ours, x[-1:], outputs, cached=(k[-1:], v[-1:]))
    name = f"({batch}, 1, {embed_dim}, {heads}), {held} held, {kv_heads} kv heads"
    return Case("native, decode", name, ours_step, {"Llama": peer_step}, 0.18)


def _window() -> Case:
    embed_dim, heads = 512, 8
    ours, peer = Attention(embed_dim, heads, window=(LEFT, 0)), Attention(embed_dim, heads)
    peer.load_state_dict(ours.state_dict())
    x = torch.randn(1, LONGEST, embed_dim)
    ours_step = step(ours, partial(ours, mask=Mask.causal()), x, training=False)
    peer_step = step(peer, partial(peer, mask=Mask.causal()), x, training=False)
    # The first queries, whose window reaches the first key, equal those of a causal layer.
    first = slice(None), slice(LEFT + 1)
    causal = Mask.causal(align="bottom-right")
    require_agreement(ours, x[first], [ours_step()[first]], mask=causal)
    name = f"(1, {LONGEST}, {embed_dim}, {heads}), window {LEFT}"
    return Case("native, causal window", name, ours_step, {"no window": peer_step}, None)


def _projections(tokens: int) -> Case:
    layer = Attention(512, 8)
    three = (layer.q_proj, layer.k_proj, layer.v_proj)
    packed = nn.Linear(512, 3 * 512)
    x = torch.randn(1, tokens, 512)

    def separate() -> list[Tensor]:
        with torch.no_grad():
            return [projection(x) for projection in three]

    return Case(
        "native, three projections",
        f"{tokens} of 512",
        separate,
        {"one packed": step(packed, packed, x, training=False)},
        None,
    )


def _product(shape: Shape) -> Case:
    """Compare the product of this processor with both: above 1, its rule is wrong here."""
    batch, length, embed_dim, _ = shape
    x, layer = torch.randn(batch, length, embed_dim), nn.Linear(embed_dim, embed_dim)
    given = (x, layer.weight.detach(), layer.bias.detach())
    products: dict[str, Any] = {"F.linear": nn.functional.linear}
    if private_torch.HAS_ONEDNN_LINEAR:
        products["oneDNN"] = private_torch.onednn_linear
    peers = {name: partial(product, *given) for name, product in products.items()}
    name = f"{batch * length} of {embed_dim}"
    return Case(
        f"product, {product_here().why}", name, partial(apply_linear, *given), {**peers}, None
    )


def _mode(training: bool) -> str:
    return "training" if training else "inference"


def _makers() -> list[Make]:
    makers: list[Make] = []
    for training in (False, True):
        makers += [partial(_self_attention, shape, training=training) for shape in SHAPES]
        makers.append(partial(_one_token, training=training))
    for fill, in_inference, in_training in FILLS:
        makers += [
            partial(_padded, fill, in_inference, training=False),
            partial(_padded, fill, in_training, training=True),
        ]
    makers += [partial(_bfloat16, shape) for shape in SHAPES[3:5]]
    makers += [partial(_product, shape) for shape in SHAPES]
    return [*makers, _decode, _window, *(partial(_projections, n) for n in TOKENS)]


MAKERS = _makers()
MEDIANS = {"native, inference": 0.65, "native, training": 0.75}
