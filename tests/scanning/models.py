"""Small models of every way in which a scan reaches attention."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Attention, Mask, Rotary

BATCH, LENGTH, SOURCE, WIDTH, HEADS, VOCABULARY = 2, 17, 9, 40, 4, 99
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 37,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REAL = torch.tensor([LENGTH, 12])
PADDING = (torch.arange(LENGTH) < REAL[:, None]).long()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY - 1, shape)


def text(*, left: bool = False) -> dict[str, Tensor]:
    """A batch with one padded sequence."""
    mask = PADDING.flip(1) if left else PADDING
    return {"input_ids": tokens(BATCH, LENGTH), "attention_mask": mask}


def spread(model: Any) -> Any:
    """In float64, with weights so large that heads differ and a mistake shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            parameter.mul_(1.5)
    return model.double().eval()


def bert() -> Any:
    return spread(transformers.BertModel(transformers.BertConfig(**SMALL)))


def gpt2() -> Any:
    return spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)))


def llama() -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, **SMALL)
    return spread(transformers.LlamaModel(config))


def falcon() -> Any:
    return spread(transformers.FalconModel(transformers.FalconConfig(**SMALL)))


def albert() -> Any:
    config = transformers.AlbertConfig(embedding_size=16, **SMALL)
    return spread(transformers.AlbertModel(config))


def deberta() -> Any:
    return spread(transformers.DebertaModel(transformers.DebertaConfig(**SMALL)))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=7, d_ff=37, num_layers=2, num_heads=HEADS
    )
    return spread(transformers.T5Model(config))


class Own(nn.Module):
    """A model of headwise's own layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layers = (Attention(WIDTH, HEADS, num_kv_heads=2, **options) for _ in range(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(layers)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = Mask.causal()
        if lengths is not None:
            mask &= Mask.lengths(keys=lengths, queries=lengths)
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return x


class Callers(nn.Module):
    """Two layers that call torch's function themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caller() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        outputs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.project(outputs.transpose(1, 2).flatten(2))


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 37, batch_first=True)
    return spread(nn.TransformerEncoder(layer, 2))


def own() -> nn.Module:
    return spread(Own(rotary=Rotary()))


def callers() -> nn.Module:
    return spread(Callers())


# name -> (model, inputs, names of the layers in call order)
Case = tuple[Callable[[], nn.Module], Callable[[], Any], tuple[str, ...]]
CASES: dict[str, Case] = {
    "bert": (bert, text, tuple(f"encoder.layer.{n}.attention.self" for n in range(2))),
    "gpt2": (gpt2, text, tuple(f"transformer.h.{n}.attn" for n in range(2))),
    "llama": (llama, lambda: text(left=True), tuple(f"layers.{n}.self_attn" for n in range(2))),
    "falcon": (falcon, text, tuple(f"h.{n}.self_attention" for n in range(2))),
    "albert": (
        albert,
        text,
        tuple(
            f"encoder.albert_layer_groups.0.albert_layers.0.attention{again}"
            for again in ("", " (2)")
        ),
    ),
    "t5": (
        t5,
        lambda: {**text(), "decoder_input_ids": tokens(BATCH, SOURCE)},
        (
            *(f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)),
            *(
                f"decoder.block.{n}.layer.{part}"
                for n in range(2)
                for part in ("0.SelfAttention", "1.EncDecAttention")
            ),
        ),
    ),
    "torch": (
        torch_encoder,
        lambda: {
            "src": torch.randn(BATCH, LENGTH, WIDTH).double(),
            "src_key_padding_mask": PADDING == 0,
        },
        tuple(f"layers.{n}.self_attn" for n in range(2)),
    ),
    "own": (own, lambda: (tokens(BATCH, LENGTH), REAL), ("blocks.0", "blocks.1")),
    "sdpa": (
        callers,
        lambda: (torch.randn(BATCH, LENGTH, WIDTH).double(), PADDING.bool()[:, None, None]),
        ("layers.0", "layers.1"),
    ),
}
