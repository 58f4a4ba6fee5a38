"""A module that attends more than once in one pass: parts of one text, or the same text again."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.scanning._scan import scan
from headwise.scanning.importance import ablations, gradients
from tests.scanning.models import (
    BATCH,
    GPT2,
    HEADS,
    LENGTH,
    SMALL,
    SOURCE,
    VOCABULARY,
    WIDTH,
    Caller,
    spread,
    tokens,
)
from tests.scanning.test_facts import record_call_sizes
from tests.scanning.test_scan import close

NAMES = ["entropy", "previous_token", "maximum"]


def diff_llama() -> Any:
    config = transformers.DiffLlamaConfig(num_key_value_heads=2, **SMALL)
    return spread(transformers.DiffLlamaForCausalLM(config))


def test_the_same_tokens_again_are_counted_once() -> None:
    """DiffLlama attends twice in each layer, with the same queries and keys."""
    ids = tokens(BATCH, LENGTH)
    found = scan(diff_llama(), ids, statistics=[*NAMES, "most_received"])
    assert found.layers == tuple(
        f"model.layers.{n}.self_attn{again}" for n in range(2) for again in ("", " (call 2)")
    )
    assert (found.sequences, found.tokens) == (BATCH, BATCH * LENGTH)
    assert [layer.calls for layer in found.layer_scans] == [1, 1, 1, 1]
    for name in NAMES:
        assert torch.equal(found[name][::2], found[name][1::2])
    for keys in found["most_received"].flatten(0, 1):
        places = [tuple(key) for key in keys[:, :2].tolist()]  # a key, and its token
        assert len(set(places)) == len(places)


def test_steps_of_generation_are_the_whole_pass() -> None:
    model, kept = diff_llama(), []

    def generate(model: Any, **given: Any) -> None:
        kept.append(model.generate(**given, max_new_tokens=3, min_new_tokens=3, do_sample=False))

    steps = scan(model, {"input_ids": tokens(1, 5)}, statistics=NAMES, call=generate)
    whole = scan(model, {"input_ids": kept[0][:, :-1]}, statistics=NAMES)
    assert steps.layers == whole.layers
    assert (steps.sequences, steps.tokens) == (1, 7) == (whole.sequences, whole.tokens)
    assert [layer.calls for layer in steps.layer_scans] == [3, 3, 3, 3]
    for name in NAMES:
        close(steps[name], whole[name])


class Heads(Caller):
    """A layer whose heads attend one after the other, or in parts of the text."""

    def __init__(self, parts: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            self.parts(part.unflatten(-1, (HEADS, -1)).transpose(1, 2))
            for part in self.qkv(x).chunk(3, -1)
        )
        for own in zip(q, k, v, strict=True):
            F.scaled_dot_product_attention(*own, is_causal=True)
        return x


def by_text(x: Tensor) -> list[Tensor]:
    """As the towers for pictures in models of transformers do: texts that stand in one row."""
    lengths = [length for length in (LENGTH, SOURCE, 3) if length <= x.shape[2]]
    return list(x.split(lengths if sum(lengths) == x.shape[2] else x.shape[2], dim=2))


def test_parts_of_a_text_are_one_layer() -> None:
    x = torch.randn(1, LENGTH + SOURCE + 3, WIDTH)
    model = nn.Sequential(Heads(by_text))
    found = scan(model, x, statistics=NAMES)
    assert found.layers == ("0",)
    assert found.layer_scans[0].calls == 3
    assert found.tokens == LENGTH + SOURCE + 3
    each = [scan(model, part, statistics=NAMES) for part in x.split([LENGTH, SOURCE, 3], dim=1)]
    for name in NAMES:
        close(found[name], each[0].merge(*each[1:])[name])


def test_heads_one_after_the_other_are_layers() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    found = scan(nn.Sequential(Heads(lambda x: list(x.split(1, dim=1)))), x, statistics=NAMES)
    assert found.layers == ("0", "0 (call 2)", "0 (call 3)", "0 (call 4)")
    assert found.tokens == BATCH * LENGTH


class Both(Caller):
    """Self-attention, then cross attention twice, by one module."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        def heads(x: Tensor) -> list[Tensor]:
            return [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1)]

        F.scaled_dot_product_attention(*heads(x))
        (q, _, _), (_, k, v) = heads(x), heads(other)
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(2 * q, k, v)
        return x


def test_self_and_cross_attention_of_one_module_are_layers() -> None:
    x, other = torch.randn(2, BATCH, LENGTH, WIDTH)
    model = Both()
    found = scan(model, (x, other), statistics=NAMES)
    assert found.layers == ("Both", "Both (call 2)", "Both (call 3)")
    assert [layer.kind for layer in found.layer_scans] == ["self", "cross", "cross"]
    assert found.tokens == BATCH * LENGTH
    assert bool(found["previous_token"][0].isfinite().all())
    assert bool(found["previous_token"][1:].isnan().all())


class Twice(nn.Module):
    """The same tokens attend twice in a layer, and the second time half as much counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Caller()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.layer.qkv(x).chunk(3, -1)
        )
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        second = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (first + second / 2).transpose(1, 2).flatten(2)


def squares(output: Tensor, _: Tensor) -> Tensor:
    return output.square().sum((-1, -2))


def test_importance_is_of_each_time() -> None:
    """The gate of g on the first and h on the second call: L = sum (g + h / 2)^2 z^2."""
    model, x = spread(Twice()), torch.randn(BATCH, LENGTH, WIDTH).double()
    z = record_call_sizes(model, x)["Twice"].outputs.square().sum((-1, -2)).mean(0)
    slopes = gradients(model, x, loss=squares)
    assert slopes.layers == ("Twice", "Twice (call 2)")
    assert slopes.tokens == BATCH * LENGTH
    close(slopes["gate_gradient"], torch.stack([3 * z, 1.5 * z]))
    off = ablations(model, x, loss=squares)
    close(off["ablation_zero"], torch.stack([(1 / 4 - 9 / 4) * z, (1 - 9 / 4) * z]))


# ---- tokens ------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), Caller()

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embed(ids))


class Twins(nn.Module):
    """One encoder reads two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, one: Tensor, other: Tensor) -> list[Tensor]:
        return [self.encoder(one), self.encoder(other)]


class Upfront(Twins):
    """Both texts are looked up before either is read."""

    def forward(self, one: Tensor, other: Tensor) -> list[Tensor]:
        states = [self.encoder.embed(ids) for ids in (one, other)]
        return [self.encoder.layer(x) for x in states]


def test_an_encoder_that_runs_twice_reads_two_texts() -> None:
    texts = tokens(BATCH, LENGTH), tokens(BATCH, LENGTH)
    found = record_call_sizes(Twins(), *texts)
    assert list(found) == ["encoder.layer", "encoder.layer (2)"]
    for call, text in zip(found.values(), texts, strict=True):
        assert call.tokens is not None
        assert torch.equal(call.tokens, text)


def test_of_two_texts_in_one_run_neither_is_taken() -> None:
    found = record_call_sizes(Upfront(), tokens(BATCH, LENGTH), tokens(BATCH, LENGTH))
    assert [call.tokens for call in found.values()] == [None, None]


def test_a_second_table_of_the_same_tokens_is_no_second_text() -> None:
    """As in Gemma 3n, which has an embedding for each layer: steps of a cache count once."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)))
            self.model.transformer.more = nn.Embedding(VOCABULARY, WIDTH).double()

        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            tables = self.model.transformer.wte, self.model.transformer.more
            x = tables[0](input_ids) + tables[1](input_ids.clone())
            return self.model(inputs_embeds=x, **options)

    model, ids = Tables().eval(), tokens(1, LENGTH)

    def steps(model: Any, ids: Tensor) -> None:
        past = model(ids[:, :9]).past_key_values
        for place in range(9, LENGTH):
            past = model(ids[:, place : place + 1], past_key_values=past).past_key_values

    names = ["duplicate_token", "induction"]
    whole = scan(model, ids, statistics=names)
    found = scan(model, ids, statistics=names, call=steps)
    for name in names:
        close(found[name], whole[name])
