"""Attention modules of transformers, and layers, that are called with their caches."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.opt.modeling_opt import OPTAttention

from headwise import Attention, Rotary, compare
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import choose_inputs
from headwise.diagnosis.simulation.model import Inputs
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.subjects.transformers import TransformersSubject
from headwise.identify import Diagnosis, Verdict
from headwise.identify.catalogue import CAUSES
from tests.quick import others_slow

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 48, 6, 2, 10, 5
CHUNKS, ONES = (6, 1, 3, 1), (1,) * 8
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "attn_implementation": "eager",
}


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=2, attn_implementation="eager")
    return GPT2Attention(config, layer_idx=1)


def neox() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    return GPTNeoXAttention(GPTNeoXConfig(**sizes, attn_implementation="eager"), 1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama.LlamaAttention(LlamaConfig(**SIZES), 1),
    "gemma": lambda: GemmaAttention(GemmaConfig(**SIZES), 1),
    "mistral": lambda: MistralAttention(MistralConfig(**SIZES, sliding_window=WINDOW), 1),
    "gpt2": gpt2,
    "neox": neox,
}


def inputs_of(width: int, steps: tuple[int, ...], **options: Any) -> Inputs:
    x = torch.randn(3, sum(steps), width, generator=torch.Generator().manual_seed(2))
    return Inputs(x, steps=steps, **options)


def static(config: Any, length: int) -> StaticCache:
    return StaticCache(config=config, max_cache_len=length + 3)


@pytest.mark.parametrize("name", others_slow(MODULES, "llama", "gpt2"))
@pytest.mark.parametrize("cache", [None, static])
@pytest.mark.parametrize("steps", [CHUNKS, pytest.param(ONES, marks=pytest.mark.slow)])
def test_a_module_with_its_caches_is_what_its_weights_state(
    name: str, cache: Any, steps: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = inputs_of(WIDTH, steps, cache=cache)
    diagnosis = compare(copy.deepcopy(module), module, inputs)
    assert diagnosis.verdict is Verdict.SAME
    assert diagnosis.function is not None
    assert {"weights", "head outputs"} <= {*diagnosis.function.stages}
    # One call of a module has the mask of its model, so steps are another way to the same outputs.
    subject = TransformersSubject(module)
    whole = subject.output(Inputs(inputs.x))
    assert torch.allclose(subject.output(inputs), whole, atol=1e-6)


@pytest.mark.slow
def test_modules_that_decode_are_called_with_a_cache_without_being_asked_to() -> None:
    """OPT multiplies its queries by the scale itself, so recorded queries are no rotated ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    module = OPTAttention(OPTConfig(**sizes, attn_implementation="eager"), layer_idx=1).eval()
    other = OPTAttention(OPTConfig(**sizes, attn_implementation="sdpa"), layer_idx=1).eval()
    other.load_state_dict(module.state_dict())
    diagnosis = compare(module, other)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    ways = "in one call: equal; in calls of 5, 1, 3, 1 tokens: equal; in calls of 1 token: equal"
    assert diagnosis.function.ways[0].startswith(ways)


def pair(window: int | None = None) -> tuple[nn.Module, Attention]:
    """Return a module of transformers, and a layer of headwise with the same weights."""
    torch.manual_seed(0)
    module = MODULES["llama" if window is None else "mistral"]()
    sides = (None if window is None else window - 1, 0)
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    sizes |= {f"{name}_bias": False for name in ("q", "k", "v", "out")}
    layer = Attention(WIDTH, HEADS, **sizes, window=sides, rotary=Rotary())
    names = {"o_proj": "out_proj"}
    state = {
        f"{names.get(name, name)}.weight": part.weight for name, part in module.named_children()
    }
    layer.load_state_dict(state)
    return module, layer


TRIED = (
    "position offset in decoding",
    "left padding in decoding",
    "window in decoding",
    "evicted keys",
    "rotary missing",
    "causal alignment",
    "causal mask missing",
    "window missing",
    "window off by one",
    "padding ignored",
)


def searched(module: nn.Module, layer: Attention, inputs: Inputs) -> Diagnosis:
    """Return the comparison with a layer, in which only causes near the faults are tried."""
    first, second = TransformersSubject(module), NativeSubject(layer)
    chosen = choose_inputs(first, second, inputs)
    causes = [cause for cause in CAUSES if cause.name in TRIED]
    return Comparison(first, second, chosen, causes).diagnosis()


def only_cause(diagnosis: Diagnosis) -> tuple[str, dict[str, Any]]:
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    return cause.name, dict(cause.parameters)


def rotate_from_zero(roles: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return transformers' rotation, by positions that begin at 0 in each call."""
    usual = llama.apply_rotary_pos_emb

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        embedding = llama.LlamaRotaryEmbedding(LlamaConfig(**SIZES))
        first = embedding(q, torch.arange(q.shape[2])[None])
        turned, right = usual(q, k, *first), usual(q, k, cos, sin)
        a, b = (
            part[0] if role in roles else part[1]
            for role, part in zip("qk", zip(turned, right, strict=True), strict=True)
        )
        return a, b

    return rotate


@pytest.mark.parametrize("roles", others_slow(["qk", "q", "k"]))
def test_positions_that_start_again(roles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = pair()
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rotate_from_zero(roles))
    name, parameters = only_cause(searched(module, layer, inputs_of(WIDTH, CHUNKS)))
    assert name == "position offset in decoding"
    assert parameters["offset"] == "from 0 again"


class ShortLayer(DynamicLayer):
    """A cache of the last four tokens before a call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **options)
        self.keys, self.values = keys[:, :, -4:], values[:, :, -4:]
        return keys, values


class ShortWindow(DynamicSlidingWindowLayer):
    """A cache that keeps one token less than its window needs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **options)
        self.keys, self.values = self.keys[:, :, 1 - WINDOW + 1 :], self.values[:, :, 2 - WINDOW :]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(self.cumulative_length, WINDOW - 2)
        return held + query_length, self.cumulative_length - held


class ShortCache(DynamicCache):
    def __init__(self, config: Any, length: int) -> None:
        del length
        super().__init__(config=config)
        is_sliding = getattr(config, "sliding_window", None) is not None
        made = [ShortWindow(WINDOW) if is_sliding else _short() for _ in self.layers]
        self.layers = made


def _short() -> ShortLayer:
    made = ShortLayer()
    seen = [0]
    usual = made.update

    def count(key_states: Tensor, *args: Any, **options: Any) -> Any:
        result = usual(key_states, *args, **options)
        seen[0] += key_states.shape[2]
        return result

    made.update = count  # type: ignore[method-assign]
    made.get_mask_sizes = lambda new: (  # type: ignore[method-assign]
        min(seen[0], 4) + new,
        seen[0] - min(seen[0], 4),
    )
    return made


@pytest.mark.parametrize(("window", "kept"), others_slow([(None, 4), (WINDOW, WINDOW - 2)]))
def test_a_cache_that_drops_keys(window: int | None, kept: int) -> None:
    module, layer = pair(window)
    inputs = inputs_of(WIDTH, CHUNKS, cache=ShortCache)
    name, parameters = only_cause(searched(module, layer, inputs))
    assert (name, parameters) == ("evicted keys", {"kept": kept})


def attend_without(part: str) -> Callable[..., Any]:
    """Return transformers' attention, which ignores a part of the mask of later calls."""
    usual = llama.eager_attention_forward

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *args: Any, **options: Any
    ) -> Any:
        past = k.shape[2] - q.shape[2]
        if past and part == "all":
            mask = torch.zeros_like(mask)
        elif past:
            hidden = ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
            mask = torch.zeros_like(mask).masked_fill(hidden, torch.finfo(mask.dtype).min)
        return usual(module, q, k, v, mask, *args, **options)

    return attend


def test_no_mask_beside_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = pair()
    monkeypatch.setattr(llama, "eager_attention_forward", attend_without("all"))
    name, parameters = only_cause(searched(module, layer, inputs_of(WIDTH, CHUNKS)))
    assert (name, parameters) == ("causal mask missing", {"calls": "with a cache"})


@pytest.mark.slow
def test_padding_that_later_calls_see(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = pair()
    monkeypatch.setattr(llama, "eager_attention_forward", attend_without("padding"))
    padding, keys = torch.tensor([0, 2, 4])[:, None], torch.arange(sum(CHUNKS))
    mask = (keys >= padding)[:, None, None] | torch.eye(len(keys), dtype=torch.bool)
    positions = (keys - padding).clamp(min=0)
    inputs = inputs_of(WIDTH, CHUNKS, mask=mask, positions=positions)
    name, parameters = only_cause(searched(module, layer, inputs))
    assert (name, parameters) == ("left padding in decoding", {"padding": "mask ignored"})


@pytest.mark.slow
def test_a_layer_with_its_cache_beside_another() -> None:
    torch.manual_seed(0)
    options = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "window": (WINDOW - 1, 0)}
    layer = Attention(WIDTH, HEADS, **options, rotary=Rotary())
    other = Attention(WIDTH, HEADS, **options, rotary=Rotary(theta=300.0))
    other.load_state_dict(layer.state_dict())
    assert compare(copy.deepcopy(layer), layer, inputs_of(WIDTH, CHUNKS)).verdict is Verdict.SAME
    assert only_cause(compare(other, layer, inputs_of(WIDTH, CHUNKS)))[0] == "rotary theta"
