"""Libraries of PyTorch and formats of inference.

x-transformers and transformers are in the development environment. The others are not; on request:

    pip install -e ".[dev,libraries]" && python -m pytest tests/layouts/test_real_libraries.py

Four want an environment of their own: "transformer-lens>=3,<4"; torchtune with "torchao<0.16";
litgpt, which asks for an older torch than it needs, with --no-deps and lightning; and flash-attn
without its kernels: FLASH_ATTENTION_FORCE_BUILD=TRUE, FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE,
pip install --no-build-isolation --no-deps flash-attn.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise import Mask, Rotary
from headwise.layers import QKNorm
from tests.layouts.captured import DIVIDED, GROUPED, SINGLE, THETA, angles, captured, model_of
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import left_open

# What these libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = {"num_heads": 12}
GROUPS = HEADS | {"num_kv_heads": 3}
TURNED = GROUPS | {"rotary": Rotary(theta=THETA)}


def weights_of(module: nn.Module, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A module's tensors, without buffers that hold no weights."""
    return {
        name: x.detach().clone()
        for name, x in module.state_dict().items()
        if isinstance(x, Tensor) and not name.startswith(without or ("\0",))
    }


@torch.no_grad()
def x_transformers() -> Real:
    library = pytest.importorskip("x_transformers.x_transformers")
    layer = library.Attention(
        40,
        dim_head=10,
        heads=12,
        kv_heads=3,
        value_dim_head=7,
        dim_out=44,
        causal=True,
        head_learned_sink=True,
    )
    layer = layer.double().eval()
    sharpen(layer)
    x = inputs(40)
    options = GROUPS | {"sink": True}
    return Real(weights_of(layer), x, layer(x), options, Mask.causal(), SINGLE)


@torch.no_grad()
def x_transformers_rotary() -> Real:
    library = pytest.importorskip("x_transformers.x_transformers")
    layer = library.Attention(40, dim_head=10, heads=12, kv_heads=3, causal=True).double().eval()
    sharpen(layer)
    x = inputs(40)
    angle = library.RotaryEmbedding(6, base=THETA).forward_from_seq_len(LENGTH)
    options = GROUPS | {"rotary": Rotary(theta=THETA, width=6)}
    outputs = layer(x, rotary_pos_emb=angle)
    return Real(weights_of(layer), x, outputs, options, Mask.causal(), SINGLE)


def gguf_llama() -> Real:
    """Hugging Face's weights, as its own reader of GGUF would have got them."""
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    counts = {"num_attention_heads": 12, "num_key_value_heads": 3}
    return gguf("LlamaConfig", reader.LlamaTensorProcessor(config=counts))


def gguf_qwen2() -> Real:
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    assert "qwen2" not in reader.TENSOR_PROCESSORS  # it is read as it is
    return gguf("Qwen2Config", reader.TensorProcessor())


def gguf(config: str, processor: Any) -> Real:
    sizes = GROUPED if config == "LlamaConfig" else DIVIDED
    model = model_of(config, **(sizes | angles()))
    real = captured(model, "layers.0.self_attn", options=TURNED)
    state = {}
    for name, tensor in real.state.items():
        local = f"attn_{name[0] if name[0] != 'o' else 'output'}{name[6:]}"
        rows = np.arange(len(tensor))[:, None]
        read = processor.process(rows, name=f"blk.0.{local}").weights[:, 0]
        state[local] = torch.empty_like(tensor)
        state[local][read] = tensor
    return replace(real, state=state)


def gguf_fused() -> Real:
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    processor = reader.GPT2TensorProcessor()
    model = model_of("GPT2Config", n_embd=120, n_head=12, n_layer=1, n_positions=64)
    real = captured(model, "h.0.attn", options=HEADS)
    state = {}
    for name, tensor in real.state.items():
        local = name.replace("c_attn", "attn_qkv").replace("c_proj", "attn_output")
        # What the reader does to it is its own inverse.
        read = processor.process(tensor.numpy(), name=f"blk.0.{local}").weights
        state[local] = torch.from_numpy(read.copy())
    return replace(real, state=state)


def lens(**options: Any) -> nn.Module:
    components = pytest.importorskip("transformer_lens.components")
    config = pytest.importorskip("transformer_lens.config.hooked_transformer_config")
    cfg = config.HookedTransformerConfig(
        n_layers=1,
        d_model=40,
        n_ctx=LENGTH,
        d_head=10,
        n_heads=12,
        act_fn="gelu",
        d_vocab=50,
        dtype=torch.float64,
        **options,
    )
    kind = "GroupedQueryAttention" if "n_key_value_heads" in options else "Attention"
    layer: nn.Module = getattr(components, kind)(cfg, "global", 0).eval()
    sharpen(layer)
    return layer


@torch.no_grad()
def of_lens(layer: nn.Module, options: dict[str, Any], mask: Mask | None, unit: float) -> Real:
    x = inputs(40)
    state = weights_of(layer, without=("mask", "IGNORE", "rotary_"))
    return Real(state, x, layer(x, x, x), options | {"scale": None}, mask, unit)


def transformer_lens() -> Real:
    return of_lens(lens(), HEADS, Mask.causal(), torch.finfo(torch.float64).eps)


def transformer_lens_gqa() -> Real:
    layer = lens(
        n_key_value_heads=3, positional_embedding_type="rotary", rotary_dim=10, rotary_base=THETA
    )
    return of_lens(layer, TURNED, Mask.causal(), SINGLE)


def transformer_lens_encoder() -> Real:
    layer = lens(attention_dir="bidirectional")
    return of_lens(layer, HEADS, None, torch.finfo(torch.float64).eps)


@torch.no_grad()
def diffusers() -> Real:
    library = pytest.importorskip("diffusers.models.attention_processor")
    layer = library.Attention(40, 36, heads=12, dim_head=10, bias=True).double().eval()
    sharpen(layer)
    x, source = inputs(40), inputs(36, seed=2)
    return Real(weights_of(layer), x, layer(x, source), HEADS, source=source)


@torch.no_grad()
def curated(*, mode: str, split: str) -> Real:
    library = pytest.importorskip("curated_transformers.layers")
    attention = pytest.importorskip("curated_transformers.layers.attention")
    heads = library.AttentionHeads.key_value_broadcast(
        n_query_heads=12, n_key_value_heads=3, qkv_split=getattr(attention, split)()
    )
    layer = library.SelfAttention(
        attention_heads=heads,
        attention_scorer=library.ScaledDotProductAttention(dropout_prob=0.0, linear_biases=None),
        hidden_width=120,
        qkv_mode=getattr(attention.QkvMode, mode),
        rotary_embeds=library.QueryKeyRotaryEmbeddings(base=THETA, fraction=1.0, head_width=10),
        use_bias=True,
    )
    layer = layer.double().eval()
    sharpen(layer)
    x = inputs(120)
    everything = attention.AttentionMask(torch.ones(BATCH, LENGTH, dtype=torch.bool))
    outputs, _ = layer(x, everything, use_causal_mask=True)
    state = weights_of(layer, without=("rotary_embeds",))
    return Real(state, x, outputs, TURNED, Mask.causal(), SINGLE)


def flash_module(name: str) -> ModuleType:
    """A module of flash-attn, without the extension for GPUs, which is not called here."""
    if find_spec("flash_attn") is not None:
        sys.modules.setdefault("flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))
    return pytest.importorskip(f"flash_attn.{name}")


def flash_layer(**options: Any) -> nn.Module:
    layer: nn.Module = flash_module("modules.mha").MHA(120, 12, use_flash_attn=False, **options)
    layer = layer.double().eval()
    sharpen(layer)
    return layer


@torch.no_grad()
def flash_attn() -> Real:
    layer, x = flash_layer(num_heads_kv=3, causal=True), inputs(120)
    return Real(weights_of(layer), x, layer(x), GROUPS, Mask.causal())


@torch.no_grad()
def flash_attn_bert() -> Real:
    layer, x = flash_layer(), inputs(120)
    return Real(weights_of(layer), x, layer(x), HEADS)


@torch.no_grad()
def flash_attn_cross() -> Real:
    layer, x, source = (
        flash_layer(num_heads_kv=3, cross_attn=True),
        inputs(120),
        inputs(120, seed=2),
    )
    return Real(weights_of(layer), x, layer(x, x_kv=source), GROUPS, source=source)


def flash_attn_llama() -> Real:
    """Hugging Face's module, and its weights as flash-attn's own converter turns them."""
    converter = flash_module("models.llama")
    model = model_of("LlamaConfig", **(DIVIDED | angles()))
    real = captured(model, "layers.0.self_attn", options=TURNED)
    whole = {f"model.{name}": x for name, x in model.state_dict().items()}
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
    config = SimpleNamespace(n_layer=1, n_head=12, n_embd=120, tie_word_embeddings=False)
    made = converter.remap_state_dict_hf_llama(whole, config)
    place = "transformer.layers.0.mixer."
    state = {n.removeprefix(place): x for n, x in made.items() if n.startswith(place)}
    return replace(real, state=state)


@torch.no_grad()
def torchtune(*, rotary: str) -> Real:
    library = pytest.importorskip("torchtune.modules")
    qwen2 = pytest.importorskip("torchtune.models.qwen2")
    kinds = {
        "interleaved": library.RotaryPositionalEmbeddings,
        "half-split": qwen2.Qwen2RotaryPositionalEmbeddings,
    }
    layer = library.MultiHeadAttention(
        embed_dim=48,
        num_heads=12,
        num_kv_heads=3,
        head_dim=10,
        q_proj=nn.Linear(48, 120),
        k_proj=nn.Linear(48, 30),
        v_proj=nn.Linear(48, 30),
        output_proj=nn.Linear(120, 44),
        pos_embeddings=kinds[rotary](10, max_seq_len=LENGTH, base=THETA),
    )
    layer = layer.double().eval()
    sharpen(layer)
    x = inputs(48)
    state = weights_of(layer, without=("pos_embeddings",))
    return Real(state, x, layer(x, x), TURNED | {"scale": None}, Mask.causal(), SINGLE)


@torch.no_grad()
def litgpt(*, is_legacy: bool) -> Real:
    library = pytest.importorskip("litgpt.model")
    config = pytest.importorskip("litgpt.config").Config(
        n_embd=48,
        n_head=12,
        n_query_groups=3,
        head_size=10,
        block_size=LENGTH,
        rotary_percentage=1.0,
        rope_base=THETA,
    )
    layer = library.CausalSelfAttention(config, 0).double().eval()
    sharpen(layer)
    state = weights_of(layer)
    if is_legacy:
        # Its own hook puts them into today's order.
        state = {name.replace("qkv.", "attn."): x for name, x in state.items()}
        layer.load_state_dict(state)
    cos, sin = library.build_rope_cache(LENGTH, 10, base=THETA)
    x = inputs(48)
    turned = GROUPS | {"rotary": Rotary(theta=THETA, width=10), "scale": None}
    return Real(state, x, layer(x, cos[None], sin[None]), turned, Mask.causal(), SINGLE)


class FluxAttention(nn.Module):
    """Flux's, of one of its two streams: RMS norms of each head, then neighbours that turn."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        norms = {name: nn.Module() for name in ("query_norm", "key_norm")}
        for norm in norms.values():
            norm.scale = nn.Parameter(torch.ones(dim // heads))
        self.norm = nn.ModuleDict(norms)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        turns = torch.outer(torch.arange(LENGTH), Rotary(theta=THETA).frequencies(10)).double()
        waves = torch.polar(torch.ones_like(turns), turns)
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm[name].scale
            for t, name in zip(split, ("query_norm", "key_norm"), strict=False)
        )
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (5, 2))) * waves).flatten(-2)
            for t in (q, k)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        outputs: Tensor = self.proj((weights @ split[2]).transpose(1, 2).flatten(2))
        return outputs


@torch.no_grad()
def test_flux_written_after_its_source() -> None:
    layer, x = FluxAttention(120, 12).double(), inputs(120)
    sharpen(layer)
    options = HEADS | {"rotary": Rotary(theta=THETA), "qk_norm": QKNorm(eps=1e-6)}
    real = Real(weights_of(layer), x, layer(x), options, unit=SINGLE)
    assert_same_function(left_open("flux", "rotary"), real)


def test_tensorrt_llm_has_llamas_rows_one_after_the_other() -> None:
    model = model_of("LlamaConfig", **(GROUPED | angles()))
    real = captured(model, "layers.0.self_attn", options=TURNED | {"scale": None})
    rows = [real.state[f"{letter}_proj.weight"] for letter in "qkv"]
    state = {"qkv.weight": torch.cat(rows), "dense.weight": real.state["o_proj.weight"]}
    assert_same_function("tensorrt-llm", replace(real, state=state))


def mlx() -> Real:
    core, library = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    core.set_default_device(core.cpu)
    layer = library.MultiHeadAttention(
        120,
        12,
        query_input_dims=40,
        key_input_dims=36,
        value_input_dims=36,
        value_dims=84,
        value_output_dims=44,
        bias=True,
    )
    twin = nn.ModuleDict(
        {
            f"{name}_proj": nn.Linear(*reversed(layer[f"{name}_proj"].weight.shape))
            for name in ("query", "key", "value", "out")
        }
    )
    sharpen(twin.double())
    state = weights_of(twin)
    layer.load_weights([(name, in_mlx(core, tensor)) for name, tensor in state.items()])
    x, source = inputs(40), inputs(36, seed=2)
    given, keys = in_mlx(core, x), in_mlx(core, source)
    outputs = torch.from_numpy(np.array(layer(given, keys, keys)))
    # The scale is handed to a kernel in float32.
    return Real(state, x, outputs, HEADS, unit=SINGLE, source=source)


def in_mlx(core: Any, tensor: Tensor) -> Any:
    return core.array(tensor.numpy(), dtype=core.float64)


CASES = {
    "x-transformers": x_transformers,
    "x-transformers-rotary": x_transformers_rotary,
    "gguf-llama": gguf_llama,
    "gguf-qwen2": gguf_qwen2,
    "gguf-fused": gguf_fused,
    "transformer-lens": transformer_lens,
    "transformer-lens-gqa": transformer_lens_gqa,
    "transformer-lens-encoder": transformer_lens_encoder,
    "flash-attn": flash_attn,
    "flash-attn-bert": flash_attn_bert,
    "flash-attn-cross": flash_attn_cross,
    "flash-attn-llama": flash_attn_llama,
    "diffusers": diffusers,
    "curated-transformers": lambda: curated(mode="SEPARATE", split="QkvSplitGroupedByHead"),
    "curated-transformers-stacked": lambda: curated(
        mode="MERGED_SPLIT_AFTER", split="QkvSplitGroupedByHead"
    ),
    "curated-transformers-grouped": lambda: curated(
        mode="MERGED_SPLIT_AFTER", split="QkvSplitGroupedByKVHeads"
    ),
    "torchtune": lambda: torchtune(rotary="interleaved"),
    "torchtune-qwen2": lambda: torchtune(rotary="half-split"),
    "litgpt": lambda: litgpt(is_legacy=False),
    "litgpt-legacy": lambda: litgpt(is_legacy=True),
    "mlx": mlx,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
