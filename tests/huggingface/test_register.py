"""register_huggingface(): the name, the optional dependency, and a trained model."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise
from headwise.errors import MissingExtraError, OptionError
from headwise.function.budget import Budget
from headwise.huggingface import NAME, register_huggingface
from headwise.huggingface.masks import _KINDS, select_trusted_readers
from headwise.models import minilm
from tests.huggingface.models import ENCODER, MODELS, Pair, watched


def test_registering_again_changes_nothing() -> None:
    assert headwise.register_huggingface() == NAME == "headwise"
    mapping = dict(transformers.AttentionInterface._global_mapping)
    masks = dict(transformers.AttentionMaskInterface._global_mapping)
    assert register_huggingface() == NAME
    assert mapping == transformers.AttentionInterface._global_mapping
    assert masks == transformers.AttentionMaskInterface._global_mapping
    assert mapping.keys() & masks.keys() >= {NAME, "sdpa"}
    assert NAME in ALL_ATTENTION_FUNCTIONS


def test_mask_functions_are_learned_before_a_model_runs() -> None:
    select_trusted_readers.cache_clear()
    with torch.device("meta"):
        register_huggingface()
    assert len(select_trusted_readers()) == len(_KINDS)
    assert select_trusted_readers.cache_info().currsize == 1


def test_nothing_heavy_is_loaded_before_it_is_called() -> None:
    code = (
        "import sys, headwise; headwise.register_huggingface;"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_without_transformers_the_message_holds_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="transformers is not installed") as error:
        register_huggingface()
    assert error.value.do == "pip install 'headwise[huggingface]'"


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers puts itself anew into sys.modules when a model is built.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(MissingExtraError, match=r"transformers 4\.57\.1"):
        register_huggingface()


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=60, hidden_size=48, n_layer=1, n_head=6),
        transformers.IBertConfig(**ENCODER),
        transformers.LongformerConfig(**ENCODER, attention_window=[4, 4]),
    ],
    ids=["bloom", "ibert", "longformer"],
)
def test_a_model_with_attention_of_its_own_does_not_go_on_silently(config: Any) -> None:
    register_huggingface()
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME)
    ids = torch.arange(10)[None]
    with pytest.raises(OptionError, match=f'"headwise" for {type(model).__name__}') as error:
        model(ids, attention_mask=(ids > 3).long())
    assert error.value.do == 'load this model with attn_implementation="eager"'


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "bart"])
def test_weights_of_every_layer(name: str) -> None:
    pair = Pair(replace(MODELS[name], reference="eager"))

    def weights(model: Any, x: Tensor) -> Tensor:
        inputs = {"decoder_input_ids": torch.arange(21).view(3, 7)} if pair.case.source else {}
        with torch.no_grad():
            out = model(inputs_embeds=x, **inputs, output_attentions=True)
        found = [w for key in out if key.endswith("attentions") for w in out[key]]
        assert len(found) == (6 if pair.case.source else 2)
        return torch.cat([w.flatten() for w in found])

    x = pair.input()
    budget = Budget.for_function(lambda x: weights(pair.theirs[x.dtype], x), x, name="weights")
    budget.assert_holds(weights(pair.ours, x))


def test_no_weights_where_none_were_asked_for() -> None:
    seen: list[object] = []
    pair = Pair(MODELS["llama"])
    for layer in pair.ours.layers:
        layer.self_attn.register_forward_hook(lambda *call: seen.append(call[-1][1]))
    pair.run(pair.ours, pair.input())
    assert seen == [None, None]


# ---- trained weights ----------------------------------------------------------------------------

TEXTS = [
    "Down, down, down. Would the fall never come to an end?",
    "Down, down.",
    "There was nothing else to do, so Alice soon began talking again.",
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_trained_encoder_on_a_padded_batch(side: str) -> None:
    try:
        place = minilm.model_folder()
    except MissingExtraError as missing:
        pytest.skip(f"the trained encoder is not installed: {missing.do}")
    register_huggingface()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModel.from_pretrained(place, attn_implementation="sdpa").eval()
    batch = tokenizer(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    real = batch["attention_mask"].bool()
    assert not real.all()
    exact = deepcopy(model).double()
    words = model.embeddings.word_embeddings(batch["input_ids"]).detach()

    def embedded(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = model(inputs_embeds=x, attention_mask=batch["attention_mask"])
        hidden: Tensor = out.last_hidden_state[real]
        return hidden

    models = {torch.float32: model, torch.float64: exact}
    budget = Budget.for_function(
        lambda x: embedded(models[x.dtype], x), words, name="hidden states"
    )
    ours = transformers.AutoModel.from_pretrained(place, attn_implementation=NAME).eval()
    with watched() as seen:
        budget.assert_holds(embedded(ours, words))
    assert len(seen) == 6
