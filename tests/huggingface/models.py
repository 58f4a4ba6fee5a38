"""Small models of transformers with random weights, in pairs: their attention, and headwise's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headwise.function.budget import Budget
from headwise.function.rounding import FORWARD
from headwise.huggingface import NAME, attention, register_huggingface
from headwise.matrix.operator import AttentionMatrix

BATCH, LENGTH, SOURCE, EMBED, HEADS, KV_HEADS = 3, 13, 17, 48, 6, 2
WINDOW, CHUNK, SOFTCAP = 5, 4, 2.0

DECODER: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": EMBED,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"]
ENCODER = {
    name: n for name, n in DECODER.items() if name not in ("num_key_value_heads", "head_dim")
}
SEQUENCES: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": EMBED,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    """A kind of model: its configuration, and which of transformers' own attentions it is like."""

    config: Callable[[], Any]
    reference: str = "sdpa"
    source: bool = False
    main: str = "inputs_embeds"
    shape: tuple[int, ...] = (BATCH, LENGTH, EMBED)
    causal_lm: bool = True


def _t(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


MODELS = {
    "llama": Case(_t("LlamaConfig", **DECODER)),
    "mistral": Case(_t("MistralConfig", **DECODER, sliding_window=WINDOW)),
    "qwen3": Case(
        _t(
            "Qwen3Config",
            **DECODER,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=BOTH,
        )
    ),
    "gemma2": Case(
        _t(
            "Gemma2Config",
            **DECODER,
            sliding_window=WINDOW,
            layer_types=BOTH,
            attn_logit_softcapping=SOFTCAP,
            query_pre_attn_scalar=5,
        ),
        reference="eager",  # sdpa has no softcap
    ),
    "gemma3": Case(_t("Gemma3TextConfig", **DECODER, sliding_window=WINDOW, layer_types=BOTH)),
    "gpt_oss": Case(
        _t(
            "GptOssConfig",
            **DECODER,
            sliding_window=WINDOW,
            layer_types=BOTH,
            num_local_experts=2,
            num_experts_per_tok=2,  # all: rounding must not choose
            experts_implementation="eager",  # the grouped kernel has no float64
        ),
        reference="eager",  # sdpa has no sinks
    ),
    "llama4": Case(
        _t(
            "Llama4TextConfig",
            **DECODER,
            attention_chunk_size=CHUNK,
            layer_types=["chunked_attention", "full_attention"],
            moe_layers=[],
            intermediate_size_mlp=64,
        )
    ),
    "gpt2": Case(_t("GPT2Config", vocab_size=60, n_embd=EMBED, n_layer=2, n_head=HEADS)),
    "bert": Case(_t("BertConfig", **ENCODER), causal_lm=False),
    "modernbert": Case(
        _t("ModernBertConfig", **ENCODER, local_attention=6, layer_types=BOTH, cls_token_id=1),
        causal_lm=False,
    ),
    "vit": Case(
        _t("ViTConfig", **ENCODER, image_size=20, patch_size=5),
        main="pixel_values",
        shape=(BATCH, 3, 20, 20),
        causal_lm=False,
    ),
    "t5": Case(
        _t(
            "T5Config",
            vocab_size=60,
            d_model=EMBED,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=HEADS,
            pad_token_id=0,
            decoder_start_token_id=1,
        ),
        source=True,
    ),
    "bart": Case(_t("BartConfig", **SEQUENCES), source=True),
    "whisper": Case(
        _t("WhisperConfig", **SEQUENCES, num_mel_bins=11, max_source_positions=SOURCE),
        source=True,
        main="input_features",
        shape=(BATCH, 11, 2 * SOURCE),
    ),
}


def shaken(model: nn.Module) -> nn.Module:
    """The model with weights so large that scores differ: a wrong mask then shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.25 * noise if weight.dim() > 1 else weight + 0.25 * noise)
    return model


def built(case: Case, implementation: str, dtype: torch.dtype, *, head: bool = False) -> Any:
    """The model of a case with the same weights each time. A configuration is not shared."""
    register_huggingface()
    kind = transformers.AutoModel
    if head:
        kind = (
            transformers.AutoModelForSeq2SeqLM if case.source else transformers.AutoModelForCausalLM
        )
    torch.manual_seed(0)
    model = kind.from_config(case.config(), attn_implementation=implementation)
    return shaken(model).to(dtype).eval()


def lengths_mask(lengths: list[int], length: int, *, side: str) -> Tensor:
    """transformers' attention_mask (batch, length): 1 = real, with padding on one side."""
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return mask if side == "right" else mask.flip(1)


@dataclass
class Pair:
    """One model with their attention in both precisions, and with headwise's in float32."""

    case: Case
    theirs: dict[torch.dtype, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dtype in (torch.float32, torch.float64):
            self.theirs[dtype] = built(self.case, self.case.reference, dtype)
        self.ours = built(self.case, NAME, torch.float32)

    def input(self) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        shape = self.case.shape
        if self.case.source and self.case.main == "inputs_embeds":
            shape = (BATCH, SOURCE, EMBED)
        return torch.randn(shape, generator=generator)

    def run(self, model: Any, x: Tensor, **inputs: Any) -> Tensor:
        if self.case.source:
            ids = torch.arange(3, 3 + BATCH * LENGTH).view(BATCH, LENGTH)
            inputs = {"decoder_input_ids": ids, **inputs}
        out: Tensor = model(**{self.case.main: x}, **inputs).last_hidden_state
        return out

    def budget(self, x: Tensor, real: Tensor | None = None, **inputs: Any) -> Budget:
        """What rounding may do to the last hidden states, at the real positions."""

        def theirs(x: Tensor) -> Tensor:
            out = self.run(self.theirs[x.dtype], x, **inputs)
            return out if real is None else out[real]

        with torch.no_grad():
            return Budget.for_function(theirs, x, factor=FORWARD, name="last hidden states")


@contextmanager
def watched() -> Iterator[list[AttentionMatrix]]:
    """The matrices that layers compute by while this is on."""
    seen: list[AttentionMatrix] = []
    original = attention.AttentionMatrix

    def kept(*args: Any, **options: Any) -> AttentionMatrix:
        seen.append(original(*args, **options))
        return seen[-1]

    attention.AttentionMatrix = kept  # type: ignore[assignment, misc]
    try:
        yield seen
    finally:
        attention.AttentionMatrix = original  # type: ignore[misc]
