"""Classes of transformers whose own files the catalogue has: the file, and what the class gives.

A model runs on random tokens, patches or features; its attention is seen by hooks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask, Rotary
from headwise.layers.distance import T5Bias
from headwise.layers.norm import QKNorm
from tests.layouts.captured import GROUPED, THETA, WHOLE, angles
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import SINGLE, VOCABULARY, written
from tools.huggingface_classes import classes

HALF = Rotary(theta=THETA)
NEIGHBOURS = Rotary(theta=THETA, pairing="interleaved")
FEW = {"num_heads": 12, "num_kv_heads": 3}
ALL = {"num_heads": 12}
NEAR = 5
PATCHES: dict[str, Any] = {"image_size": 8, "patch_size": 2}
IMAGES = (BATCH, 3, 8, 8)
FIRST = {"layer": 0}
Run = Callable[[Any], object]


def model_of(model_type: str, **sizes: Any) -> Any:
    """A small random model in float64, by its model_type."""
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_hidden_layers": 1}
    config = classes.config_class(model_type)(**common | sizes)
    kind = classes.model_class(model_type)
    assert kind is not None
    model = kind._from_config(config, attn_implementation="eager").double().eval()
    sharpen(model)
    return model


def read(model: Any) -> object:
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=_generator())
    return model(tokens)


def look(model: Any) -> object:
    return model(pixel_values=torch.randn(IMAGES, generator=_generator(), dtype=torch.float64))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@torch.no_grad()
def real(
    layout: str,
    model: nn.Module,
    queries: str,
    output: str,
    options: dict[str, Any],
    *,
    run: Run = read,
    mask: Mask | None = None,
    role: str = "self",
    keys: str = "",
    numbers: Mapping[str, int] = FIRST,
) -> Real:
    """What the projections named ``queries`` and ``keys`` are given, and ``output`` gives."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def kept(_: nn.Module, args: Any, output: Tensor) -> None:
            seen.setdefault(name, output if name == "output" else args[0])

        return kept

    places = {"x": queries, "output": output} | ({"source": keys} if keys else {})
    for name, place in places.items():
        model.get_submodule(place).register_forward_hook(keep(name))
    run(model)
    state = written(model, layout, role=role, **numbers)
    given = {"mask": mask, "unit": SINGLE, "source": seen.get("source")}
    return Real(state, seen["x"], seen["output"], options, **given)


def decoder(
    layout: str,
    model_type: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
    *,
    within: str = "layers.0.self_attn",
    names: str = "q_proj o_proj",
    mask: Mask | None = None,
    **more: Any,
) -> Real:
    """A model that reads tokens; its mask is causal if nothing else is said."""
    queries, output = (f"{within}.{name}" for name in names.split())
    model = model_of(model_type, **sizes)
    return real(layout, model, queries, output, options, mask=mask or Mask.causal(), **more)


def openai_privacy_filter() -> Real:
    sizes = GROUPED | angles() | {"num_local_experts": 2, "num_experts_per_tok": 1}
    sizes |= {"sliding_window": NEAR, "attention_bias": True}
    options = FEW | {"rotary": NEIGHBOURS, "scale": None}
    near = Mask.window(NEAR, NEAR)
    return decoder("openai-privacy-filter", "openai_privacy_filter", sizes, options, mask=near)


def dia() -> Real:
    sizes = GROUPED | angles() | {"num_key_value_heads": 12}
    options = ALL | {"rotary": HALF, "scale": 1.0}
    place, everywhere = "layers.0.self_attention", Mask.window(LENGTH, LENGTH)
    return decoder("dia", "dia_encoder", sizes, options, within=place, mask=everywhere)


def moshi() -> Real:
    names = "q_proj.linear o_proj.linear"
    sizes = GROUPED | angles() | {"ffn_dim": 56}
    return decoder("moshi", "moshi", sizes, FEW | {"rotary": HALF}, names=names)


def ctrl() -> Real:
    sizes = {"n_embd": 40, "n_head": 8, "n_layer": 1, "dff": 56, "n_positions": 64}
    place = "h.0.multi_head_attention"
    return decoder("ctrl", "ctrl", sizes, {"num_heads": 8}, within=place, names="Wq dense")


def flint() -> Real:
    sizes = GROUPED | angles() | {"layer_types": ["sliding_attention"], "sliding_window": NEAR}
    norm = QKNorm(eps=1e-6)
    options = FEW | {"rotary": HALF, "qk_norm": norm, "window": (NEAR - 1, None)}
    return decoder("flint", "flint", sizes | {"rms_norm_eps": norm.eps}, options)


def esmc() -> Real:
    options = ALL | {"rotary": HALF, "qk_norm": QKNorm("layer", over="width", eps=1e-5)}
    everywhere = Mask.window(LENGTH, LENGTH)
    return decoder("esmc", "esmc", WHOLE | angles(), options, mask=everywhere)


def hrm_text() -> Real:
    place = "L_module.layers.0.self_attn"
    sizes = GROUPED | angles() | {"num_key_value_heads": 12}
    return decoder("hrm-text", "hrm_text", sizes, ALL | {"rotary": HALF}, within=place)


def molmo2() -> Real:
    sizes = GROUPED | angles() | {"layer_norm_eps": 1e-6, "qkv_bias": True}
    options = FEW | {"rotary": HALF, "qk_norm": QKNorm(eps=1e-6)}
    # The text model alone has its layers elsewhere than the whole file.
    return decoder("molmo2", "molmo2_text", sizes, options, role="", numbers={})


def gradium() -> Real:
    sizes = WHOLE | angles() | {"flow_head_config": {"condition_dim": 120}}
    return decoder("gradium", "gradium_phonon_tts", sizes, ALL | {"rotary": NEIGHBOURS})


def modernbert_decoder() -> Real:
    rope = {"rope_type": "default", "rope_theta": THETA}
    tokens = dict.fromkeys((f"{kind}_token_id" for kind in ("bos", "eos", "cls", "sep")), 0)
    sizes = WHOLE | tokens | {"layer_types": ["full_attention"], "attention_bias": True}
    sizes |= {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    options = ALL | {"rotary": HALF}
    within = {"within": "layers.0.attn", "names": "q_proj Wo"}
    return decoder("modernbert-decoder", "modernbert-decoder", sizes, options, **within)


def albert() -> Real:
    place = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    model = model_of("albert", **WHOLE, embedding_size=24)
    return real(
        "albert", model, f"{place}.query", f"{place}.dense", ALL, numbers=FIRST | {"stage": 0}
    )


def qformer() -> Real:
    def run(model: Any) -> object:
        source = inputs(32, length=LENGTH - 5, seed=2)
        return model(query_embeds=inputs(120), encoder_hidden_states=source)

    place = "encoder.layer.0.crossattention"
    model = model_of("blip_2_qformer", **WHOLE, encoder_hidden_size=32)
    queries, keys, output = (f"{place}.{n}" for n in QFORMER.split())
    return real("qformer", model, queries, output, ALL, run=run, role="cross", keys=keys)


QFORMER = "attention.query attention.key output.dense"
TEXT: dict[str, Any] = {"hidden_size": 40, "num_heads": 8, "d_kv": 5, "num_layers": 1, "d_ff": 56}
TEXT |= {"initializer_range": 0.02}


def pix2struct() -> Real:
    sizes = TEXT | {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 20}
    bias = T5Bias(buckets=6, max_distance=20, bidirectional=False)
    options = {"num_heads": 8, "scale": 1.0, "score_bias": bias}
    within = {"within": "layer.0.self_attention.attention", "names": "query output"}
    return decoder("pix2struct", "pix2struct_text_model", sizes, options, **within, role="decoder")


def pix2struct_cross() -> Real:
    def run(model: Any) -> object:
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=_generator())
        return model(tokens, encoder_hidden_states=inputs(40, length=LENGTH - 5, seed=2))

    place = "layer.0.encoder_decoder_attention.attention"
    model, options = model_of("pix2struct_text_model", **TEXT), {"num_heads": 8, "scale": 1.0}
    queries, keys, output = (f"{place}.{name}" for name in ("query", "key", "output"))
    kept = {"run": run, "role": "cross", "keys": keys}
    return real("pix2struct-cross", model, queries, output, options, **kept)


def janus() -> Real:
    place = "encoder.layers.0.self_attn"
    model = model_of("janus_vision_model", **WHOLE, **PATCHES, attention_bias=True)
    return real("janus", model, f"{place}.q_proj", f"{place}.projection_layer", ALL, run=look)


def xclip() -> Real:
    def run(model: Any) -> object:
        source = inputs(40, length=LENGTH - 5, seed=2)
        return model.prompts_generator.decoder[0].cross_attn(inputs(40), source, source)

    tower = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes = {"prompt_layers": 1, "prompt_num_attention_heads": 8, "projection_dim": 40}
    model = model_of("xclip", **sizes, text_config=tower, vision_config=tower)
    place = "prompts_generator.decoder.0.cross_attn"
    queries, keys, output = (f"{place}.{name}" for name in ("q_proj", "k_proj", "proj"))
    return real("xclip", model, queries, output, {"num_heads": 8}, run=run, keys=keys)


def timesformer() -> Real:
    def run(model: Any) -> object:
        frames = torch.randn(BATCH, 2, *IMAGES[1:], generator=_generator(), dtype=torch.float64)
        return model(pixel_values=frames)

    place = "encoder.layer.0.attention"
    model = model_of("timesformer", **WHOLE, **PATCHES, num_frames=2)
    names = f"{place}.attention.qkv", f"{place}.output.dense"
    return real("timesformer", model, *names, ALL, run=run)


CASES: dict[str, Callable[[], Real]] = {
    "openai-privacy-filter": openai_privacy_filter,
    "dia": dia,
    "moshi": moshi,
    "ctrl": ctrl,
    "flint": flint,
    "esmc": esmc,
    "hrm-text": hrm_text,
    "molmo2": molmo2,
    "gradium": gradium,
    "modernbert-decoder": modernbert_decoder,
    "albert": albert,
    "qformer": qformer,
    "pix2struct": pix2struct,
    "pix2struct-cross": pix2struct_cross,
    "janus": janus,
    "xclip": xclip,
    "timesformer": timesformer,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
