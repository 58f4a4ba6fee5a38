"""generate(): the same tokens as with transformers' own attention, with any cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.huggingface import NAME
from headwise.masks.clauses.dense import Dense
from headwise.matrix.operator import AttentionMatrix
from tests.huggingface.models import BATCH, LENGTH, MODELS, built, lengths_mask, watched

NEW = 9  # tokens; with the prompt, more than any window or chunk
LENGTHS = [LENGTH, 7, 2]


def prompt() -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = lengths_mask(LENGTHS, LENGTH, side="left")
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    # No token twice: a model of random weights would name one over and over.
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "no_repeat_ngram_size": 1}
    told = {"return_dict_in_generate": True, "output_scores": True}
    return model.generate(**inputs, **{"do_sample": False, **fixed, **options, **told})


def check(name: str, dtype: torch.dtype, **options: Any) -> list[AttentionMatrix]:
    """The same tokens; if the largest is taken, by a margin that rounding is far from."""
    theirs = built(MODELS[name], MODELS[name].reference, dtype, head=True)
    ours = built(MODELS[name], NAME, dtype, head=True)
    inputs = prompt()
    if MODELS[name].source:
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    expected = tokens(theirs, inputs, **options)
    with watched() as seen:
        found = tokens(ours, inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    if options.keys() <= {"cache_implementation", "use_cache", "prefill_chunk_size"}:
        for a, b in zip(found.scores, expected.scores, strict=True):
            first, second = b.topk(2, dim=-1).values.unbind(-1)
            moved = (a - b).where(b.isfinite(), 0.0).abs()
            assert float(moved.max()) < float((first - second).min()) / 2
    assert seen
    return seen


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "llama4", "gpt2"])
def test_greedy(name: str, cache: str) -> None:
    if name == "gpt2" and cache == "static":
        pytest.skip("GPT-2 of transformers has no static cache")
    seen = check(name, torch.float64, cache_implementation=cache)
    # Written masks are those of one query, in the steps with a static cache.
    assert all(
        min(c.allowed.shape[2], matrix.shape[2]) == 1
        for matrix in seen
        for c in matrix.mask.clauses_of_kind(Dense)
    )


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_like_eager(name: str, cache: str) -> None:
    # In float64, eager turns a query that may attend to nothing into NaN.
    check(name, torch.float32, cache_implementation=cache)


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_encoder_and_decoder(name: str, cache: str) -> None:
    check(name, torch.float64, cache_implementation=cache)


@pytest.mark.parametrize("name", ["llama", "mistral", "bart"])
def test_beams(name: str) -> None:
    check(name, torch.float64, num_beams=3)


def test_without_a_cache() -> None:
    check("llama", torch.float64, use_cache=False)


def test_sampling() -> None:
    check("llama", torch.float64, do_sample=True, temperature=2.0)


def test_a_long_prompt_in_parts() -> None:
    check("mistral", torch.float64, prefill_chunk_size=4)


def test_assisted_by_a_smaller_model() -> None:
    # Several candidate tokens are checked in one pass: more than one query with a cache.
    theirs = built(MODELS["llama"], "sdpa", torch.float64, head=True)
    ours = built(MODELS["llama"], NAME, torch.float64, head=True)
    inputs = {"input_ids": prompt()["input_ids"][:1]}
    expected = tokens(theirs, inputs)
    with watched() as seen:
        found = tokens(
            ours, inputs, assistant_model=built(MODELS["llama"], NAME, torch.float64, head=True)
        )
    assert torch.equal(found.sequences, expected.sequences)
    assert any(1 < matrix.shape[2] < matrix.shape[3] for matrix in seen)
