"""Small models of transformers with random weights, one of each family, and their inputs.

A family is called with fields of its config that shall be others.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from headwise.function.budget import Budget
from headwise.surgery import Cut, ModelHeads

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 97, 48, 6, 3, 10
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _encoder(name: str, **more: Any) -> Callable[..., Any]:
    options = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        **more,
    }
    return _made(name, **options)


def _decoder(name: str, config: str | None = None, **more: Any) -> Callable[..., Any]:
    options = {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, **SPECIAL, **more}
    return _encoder(name, config=config, vocab_size=VOCABULARY, **options)


def _made(name: str, *, config: str | None = None, **options: Any) -> Callable[..., Any]:
    base = name.removesuffix("Model").removesuffix("ForCausalLM")
    kind = config or base.removesuffix("LMHead").removesuffix("ForConditionalGeneration") + "Config"

    def make(**changes: Any) -> Any:
        torch.manual_seed(0)
        stated = getattr(transformers, kind)(**{**options, **changes})
        model = getattr(transformers, name)(stated)
        for parameter in model.parameters():  # norms and biases that are not all 1 or 0
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return make


FAMILIES: dict[str, Callable[..., Any]] = {
    "bert": _encoder("BertModel", vocab_size=VOCABULARY),
    "gpt2": _made(
        "GPT2LMHeadModel",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
        n_positions=64,
        **SPECIAL,
    ),
    "llama": _decoder("LlamaForCausalLM"),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "gemma": _decoder("GemmaForCausalLM"),
    "gemma2": _decoder("Gemma2ForCausalLM"),
    "gemma3": _decoder("Gemma3ForCausalLM", config="Gemma3TextConfig"),
    "vit": _encoder("ViTModel", image_size=32, patch_size=8),
    "t5": _made(
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD_DIM,
        num_layers=2,
        num_heads=HEADS,
        d_ff=64,
        decoder_start_token_id=0,
    ),
    "bart": _made(
        "BartForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        **SPECIAL,
    ),
}
WIDTH_BOUND = ("bert", "gpt2", "bart")  # head_dim is hidden_size / heads, whatever the config says
GROUPED = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Arguments of a model."""
    generator = torch.Generator().manual_seed(7)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (3, 17), generator=generator)
    given = {"input_ids": ids}
    return (
        {**given, "decoder_input_ids": ids[:, :11].contiguous()}
        if model.config.is_encoder_decoder
        else given
    )


@torch.no_grad()
def output_of(model: Any, inputs: dict[str, Tensor] | None = None) -> Tensor:
    """The first output, in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    given = inputs_of(model) if inputs is None else inputs
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    result: Tensor = model(**given)[0]
    return result


def whole(model: Any) -> Cut:
    """The cut of a model that does nothing yet."""
    return ModelHeads(model).whole()


def without(model: Any, heads: list[int]) -> Cut:
    """The cut that takes these heads out of every layer."""
    return Cut({name: layer.drop(heads) for name, layer in whole(model)})


def output_budget(model: Any, inputs: Mapping[str, Tensor]) -> Budget:
    """The error that every honest way to the model's output may have."""
    names = [name for name, _ in model.named_parameters()]

    def output(*given: Tensor) -> Tensor:
        wide = copy.deepcopy(model).to(given[0].dtype)
        state = dict(zip(names, given, strict=True))
        cast = {n: x.to(given[0].dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        result: Tensor = torch.func.functional_call(wide, state, (), cast)[0]
        return result

    with torch.no_grad():
        return Budget.for_function(output, *(x.detach() for x in model.parameters()))
