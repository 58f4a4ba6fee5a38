"""Small models and data to choose heads on."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headwise.models.tiny import Tiny, TinySizes
from headwise.scanning.record import record_attention
from tests.scanning import models

SIZES = TinySizes(embed_dim=40, num_layers=3, num_heads=5, wide=36)


def ids(*shape: int, seed: int = 0) -> Tensor:
    """Token ids below the vocabulary of all models here."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, shape, generator=generator)


def tiny(seed: int = 0, sizes: TinySizes = SIZES) -> Tiny:
    """A model of headwise's layers in float64, all of whose heads matter."""
    torch.manual_seed(seed)
    model = Tiny(sizes)
    for block in model.block_list():
        nn.init.normal_(block.attention.out_proj.weight, std=0.3)
        nn.init.normal_(block.narrow.weight, std=0.1)
    return model.double().eval().requires_grad_(False)


def text(batch: int = 4, length: int = 11, seed: int = 0) -> dict[str, Tensor]:
    """A batch with padding."""
    lengths = torch.arange(batch) % 3
    mask = (torch.arange(length) < length - 3 * lengths[:, None]).long()
    return {"input_ids": ids(batch, length, seed=seed), "attention_mask": mask}


def grouped() -> Any:
    """Llama for language with 8 heads, of which 4 share a kv head, and a head_dim of its own."""
    sizes = models.SMALL | {"num_attention_heads": 8}
    config = transformers.LlamaConfig(num_key_value_heads=2, head_dim=10, **sizes)
    return models.spread(transformers.LlamaForCausalLM(config))


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        image_size=12,
        patch_size=4,
    )
    return models.spread(transformers.ViTModel(config))


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=99,
        d_model=40,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        max_position_embeddings=30,
    )
    return models.spread(transformers.BartForConditionalGeneration(config))


def pair(seed: int = 0) -> dict[str, Tensor]:
    """Texts for an encoder and a decoder."""
    return {**text(seed=seed), "decoder_input_ids": ids(4, 7, seed=seed + 1)}


def images(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(4, 3, 12, 12, generator=generator).double()}


FAMILIES: dict[str, tuple[Any, Any]] = {
    "tiny": (tiny, lambda seed: ids(4, 12, seed=seed)),
    "bert": (models.bert, lambda seed: text(seed=seed)),
    "gpt2": (models.gpt2, lambda seed: text(seed=seed)),
    "llama": (grouped, lambda seed: text(seed=seed)),
    "vit": (vit, images),
    "t5": (models.t5, pair),
    "bart": (bart, pair),
}


def first(output: Any) -> Tensor:
    """The first tensor of an output."""
    return output if isinstance(output, Tensor) else output[0]


@torch.no_grad()
def run(model: Any, given: Any) -> Tensor:
    """The first output for an input."""
    return first(model(**given) if isinstance(given, dict) else model(given))


@torch.no_grad()
def run_replaced(model: Any, given: Any, replaced: dict[str, dict[int, Tensor]]) -> Tensor:
    """The first output with the outputs of some heads replaced by a vector, while it runs.

    ``replaced``: for each recorded layer, the vector of each head.
    """

    def watch(call: Any) -> Tensor | None:
        outputs = call.outputs.clone()
        for head, vector in replaced.get(call.layer, {}).items():
            outputs[:, head] = vector.to(outputs)
        return outputs

    with record_attention(model, watch):
        return run(model, given)


def rounding(model: Any, given: Any) -> float:
    """Rounding of a model's output in float64, from that in float32: the same sums, 2**29 apart."""
    import copy

    single = copy.deepcopy(model).float()
    narrow = (
        {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
        if isinstance(given, dict)
        else given
    )
    worst = float((run(single, narrow).double() - run(model, given)).abs().max())
    return worst * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
