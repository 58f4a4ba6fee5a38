"""Numbers of scans: the model that ships, and random models of transformers from small configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.models.tiny import load
from tools.proof.digests import Entries, digest_tensors

VOCABULARY, LENGTH = 60, 29


def make_models() -> dict[str, Any]:
    """Return three random models of transformers by name, and save each in a folder of its name."""
    import transformers

    widths: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    encoder: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 6, "max_position_embeddings": 64}
    gpt2 = transformers.GPT2Config(
        **widths, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    llama = transformers.LlamaConfig(**widths, **encoder, num_key_value_heads=2, head_dim=8)
    bert = transformers.BertConfig(**widths, **encoder)
    kinds: dict[str, tuple[Any, Any]] = {
        "gpt2": (transformers.GPT2LMHeadModel, gpt2),
        "llama": (transformers.LlamaForCausalLM, llama),
        "bert": (transformers.BertModel, bert),
    }
    models = {}
    for name, (kind, config) in kinds.items():
        torch.manual_seed(0)
        models[name] = kind(config).eval()
        models[name].save_pretrained(name)
    weights = load_file("llama/model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    weights[key] = weights[key].roll(8, 0)  # each head has the place of the next
    models["llama"].save_pretrained("rolled")
    save_file(weights, "rolled/model.safetensors", metadata={"format": "pt"})
    return models


def measure_scans(models: Mapping[str, Any]) -> Entries:
    """Scan the model that ships and the random models, on tokens with a repeat."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    tokens[:, LENGTH // 2 :] = tokens[:, : LENGTH - LENGTH // 2]  # a repeat, for induction
    for name, model in {"tiny": load(), **models}.items():
        scan = headwise.scan(model, tokens, separators=(5,), specials=(1,))
        values = {one: scan[one] for one in scan.measured}
        yield (
            name,
            {
                one: x.tolist() if x.dim() <= 2 else digest_tensors({one: x})
                for one, x in values.items()
            }
            | {"notes": list(scan.notes)},
        )
        for layer in scan.layer_scans:
            yield (
                f"{name}: {layer.name}",
                {one: digest_tensors(summary) for one, summary in sorted(layer.summaries.items())},
            )
