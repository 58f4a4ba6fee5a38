"""`scan`: every way of reaching attention, what it says of it, and how it leaves the model."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import AttentionMatrix, Mask
from headwise.errors import OptionError
from headwise.matrix.kernels import tiles
from headwise.models import tiny
from headwise.scanning._scan import scan
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention
from headwise.scanning.statistics.catalogue import STANDARD
from tests.memory import LargestTensor
from tests.quick import others_extra
from tests.scanning.models import (
    BATCH,
    CASES,
    HEADS,
    LENGTH,
    REAL,
    VOCABULARY,
    WIDTH,
    bert,
    callers,
    deberta,
    gpt2,
    own,
    t5,
    text,
    tokens,
)

FEW = ["entropy", "previous_token", "first_token", "distance", "map"]
EPS = torch.finfo(torch.float32).eps


def run(model: Any, given: Any) -> Any:
    return model(**given) if isinstance(given, dict) else model(*given)


def state_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def close(a: Tensor, b: Tensor) -> None:
    """Two ways to the same numbers in float64 part by far less than a rounding of float32."""
    torch.testing.assert_close(a, b, rtol=EPS, atol=EPS, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_seen_in_call_order(name: str) -> None:
    make, inputs, layers = CASES[name]
    found = scan(make(), inputs(), statistics=FEW)
    assert found.layers == layers
    assert found["entropy"].shape == (len(layers), HEADS)
    assert bool(found["entropy"].isfinite().all())
    assert found.notes == ()
    assert found.sequences == BATCH
    # The native decoder's and the encoder's padding are not counted.
    assert found.tokens == int(REAL.sum())
    kinds = ["cross" if "EncDec" in layer else "self" for layer in layers]
    assert [layer.kind for layer in found.layer_scans] == kinds


@pytest.mark.parametrize("name", CASES)
def test_outputs_at_real_positions_stay(name: str) -> None:
    make, inputs, _ = CASES[name]
    model, given = make(), inputs()
    kept = []
    with torch.no_grad(), warnings.catch_warnings():
        # torch's encoder packs padded sequences into nested tensors, of which it warns.
        warnings.simplefilter("ignore", UserWarning)
        before = state_of(run(model, given))

    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        kept.append(state_of(model(*args, **kwargs)))

    scan(model, given, statistics=["entropy"], call=call)
    real = torch.ones(before.shape[:2], dtype=torch.bool)
    if before.shape[1] == LENGTH:
        real = torch.arange(LENGTH) < REAL[:, None]
        real = real.flip(1) if name == "llama" else real
    close(kept[0][real], before[real])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_left_as_it_was_found(name: str, fails: bool) -> None:
    make, inputs, _ = CASES[name]
    model = make().train()
    next(iter(model.modules())).training = True
    before = _trace_of(model)
    given = inputs()

    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        assert not model.training
        model(*args, **kwargs)
        if fails:
            raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            scan(model, given, statistics=["entropy"], call=call)
    else:
        scan(model, given, statistics=["entropy"], call=call)
    assert _trace_of(model) == before


def _trace_of(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    config = None if config is None else (config._attn_implementation, str(config))
    return (
        [(name, m.training, type(m)) for name, m in model.named_modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [float(p.detach().double().sum()) for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        config,
    )


def test_streamed_is_what_the_eager_path_returns() -> None:
    model, given = bert(), text()
    found = scan(model, given, statistics=["entropy", "previous_token", "maximum"])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(**given, output_attentions=True).attentions).double()
    real = torch.arange(LENGTH) < REAL[:, None]

    def mean(rows: Tensor, counted: Tensor) -> Tensor:
        return rows.transpose(1, 2)[:, :, counted].mean(-1)

    counted = real.clone()
    close(found["maximum"], mean(weights.amax(-1), counted))
    entropy = -torch.xlogy(weights, weights).sum(-1)
    close(found["entropy"], mean(entropy, counted))
    before = F.pad(weights.diagonal(-1, -2, -1), (1, 0))
    counted[:, 0] = False
    close(found["previous_token"], mean(before, counted))


def test_padding_and_batches_change_nothing() -> None:
    model, given = bert(), text()
    together = scan(model, given, statistics=FEW)
    one_by_one = [
        {"input_ids": given["input_ids"][i : i + 1, :n], "attention_mask": torch.ones(1, n).long()}
        for i, n in enumerate(REAL.tolist())
    ]
    for other in (
        scan(model, one_by_one, statistics=FEW),
        scan(model, one_by_one[0], statistics=FEW).merge(
            scan(model, one_by_one[1], statistics=FEW)
        ),
    ):
        assert (other.sequences, other.tokens) == (together.sequences, together.tokens)
        for name in FEW:
            close(other[name], together[name])


def test_steps_with_a_cache_are_the_whole_pass() -> None:
    model, new = gpt2(), 4
    ids = tokens(1, 5)
    kept = []

    def generate(model: Any, **given: Any) -> None:
        kept.append(model.generate(**given, max_new_tokens=new, do_sample=False, min_length=9))

    names = ["entropy", "previous_token", "first_token", "duplicate_token", "distance"]
    steps = scan(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        statistics=names,
        call=generate,
    )
    whole = scan(model, {"input_ids": kept[0][:, :-1]}, statistics=names)
    assert [layer.calls for layer in steps.layer_scans] == [new, new]
    assert steps.layers == whole.layers
    assert steps.tokens == whole.tokens
    for name in names:
        close(steps[name], whole[name])


def test_layers_and_heads_may_be_chosen() -> None:
    model, given = own(), (tokens(BATCH, LENGTH), REAL)
    whole = scan(model, given, statistics=FEW)
    part = scan(model, given, statistics=FEW, layers=["*.1"], heads=[3, 1])
    assert part.layers == ("blocks.1",)
    assert part.layer_scans[0].heads == (3, 1)
    twice = scan(model, given, statistics=FEW[:1], layers=["*.1"], heads=[3, 1, 3])
    assert twice.layer_scans[0].heads == (3, 1)
    for name in FEW:
        for head in (1, 3):
            close(part[name][0, head], whole[name][1, head])
        assert bool(part[name][0, [0, 2]].isnan().all())


def test_contributions_are_measured_against_the_residual() -> None:
    model, given = gpt2(), text()
    found = scan(model, given, statistics=["contribution_norm", "relative_contribution"])
    inputs, merged = [], []
    block = model.transformer.h[1]
    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: merged.append(args[0])),
    ]
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    outputs = merged[0].double().unflatten(-1, (HEADS, -1))
    weight = block.attn.c_proj.weight.detach().double().unflatten(0, (HEADS, -1))
    norms = torch.einsum("bqhd,hde->bqhe", outputs, weight).norm(dim=-1)
    real = torch.arange(LENGTH) < REAL[:, None]
    close(found["contribution_norm"][1], norms[real].mean(0))
    relative = norms / inputs[0].double().norm(dim=-1)[..., None]
    close(found["relative_contribution"][1], relative[real].mean(0))


def test_cross_attention_has_no_places() -> None:
    _, inputs, layers = CASES["t5"]
    found = scan(t5(), inputs(), statistics=FEW)
    for row, layer in enumerate(layers):
        assert bool(found["previous_token"][row].isnan().all()) == ("EncDec" in layer)
    assert "cross attention" in found.layer_scans[3].missing["distance"]


def test_a_function_and_a_matrix_can_be_scanned() -> None:
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, 8).double() for _ in range(3))

    def attend(q: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(first, k, v, is_causal=True)

    found = scan(attend, q, statistics=FEW)
    assert found.layers == ("attention", "attention (2)")
    matrix = scan(AttentionMatrix(q, k), v, statistics=FEW)
    close(matrix["entropy"][0], found["entropy"][0])


def test_hidden_by_a_large_negative_number_is_hidden() -> None:
    q = torch.randn(BATCH, HEADS, LENGTH, 8).double()
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    added = torch.zeros(LENGTH, LENGTH).double()
    added.masked_fill_(~causal, torch.finfo(torch.float64).min)
    names = ["relative_entropy", "score_range"]
    by_number, by_mask = (
        scan(
            lambda q, mask=mask: F.scaled_dot_product_attention(q, q, q, mask), q, statistics=names
        )
        for mask in (added, causal)
    )
    for name in names:
        close(by_number[name], by_mask[name])


# ---- what is refused, or said ------------------------------------------------------------------


class HalvedAttention(nn.Module):
    """Attention with other weights than those of its softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(40).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return ((x @ x.mT).softmax(-1) / 2) @ x


def test_attention_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="HalvedAttention"):
        scan(HalvedAttention(), torch.randn(BATCH, LENGTH, 40).double())


def test_products_of_a_model_of_transformers_give_the_weights_that_it_returns() -> None:
    model, given, calls = deberta(), text(), list[CapturedCall]()
    with record_attention(model, on_complete=calls.append) as recorder, torch.no_grad():
        recorder.begin_input()
        returned = model(**given, output_attentions=True).attentions
    real = given["attention_mask"].bool()
    assert len(calls) == len(returned) > 1
    for call, weights in zip(calls, returned, strict=True):
        shown = call.matrix.dense().transpose(1, 2)[real]
        torch.testing.assert_close(shown, weights.transpose(1, 2)[real])


def test_what_was_not_reached_is_said() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.hidden = (
                callers(),
                nn.ModuleList([HalvedAttention(), HalvedAttention()]),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.seen(x) + self.hidden[0](x) + self.hidden[1](x)

    given = torch.randn(BATCH, LENGTH, 40).double()
    found = scan(Both().eval(), given, statistics=["entropy"])
    assert found.layers == ("seen.layers.0", "seen.layers.1")
    assert len(found.notes) == 1
    assert "HalvedAttention" in found.notes[0]
    assert "not captured: 2 modules similar to attention" in found.notes[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"statistics": ["entropie"]}, "entropie"),
        ({"layers": ["decoder*"]}, r"decoder\*"),
        ({"heads": [0, 4]}, "heads from 0 to 3"),
        ({"statistics": ["sink"]}, "no learned sink"),
        ({"statistics": ["separator"]}, "separator"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        scan(bert(), text(), **options)


def test_induction_needs_tokens() -> None:
    with pytest.raises(OptionError, match=r"induction.*tokens are unknown"):
        scan(callers(), (torch.randn(BATCH, LENGTH, 40).double(),), statistics=["induction"])


TABLES = {"vocab_size": 61, "hidden_size": 42, "num_hidden_layers": 1, "num_attention_heads": 6}
POSITIONS = {
    "gpt2": (transformers.GPT2Config(n_embd=42, n_head=6, n_layer=1, n_positions=27), 27),
    "bert": (transformers.BertConfig(**TABLES, max_position_embeddings=27), 27),
    "roberta": (
        transformers.RobertaConfig(**TABLES, max_position_embeddings=29, pad_token_id=1),
        27,
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_more_tokens_than_positions(name: str) -> None:
    config, most = POSITIONS[name]
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.randint(2, 60, (3, most + 1))
    scan(model, ids[:, :most], statistics=["entropy"])
    for given in (ids, {"input_ids": ids}):
        with pytest.raises(
            OptionError, match=rf"token ids of shape \(3, {most + 1}\), at which"
        ) as e:
            scan(model, given, statistics=["entropy"])
        assert f"at most {most} tokens, the number of positions" in str(e.value)
        assert f"ids[:, :{most}]" in str(e.value)


def test_more_tokens_than_a_rotary_model_was_trained_on() -> None:
    """Rotary has a rotation for every position, so the number in the config is no limit."""
    sizes = {**TABLES, "hidden_size": 60, "intermediate_size": 56}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=27)
    found = scan(transformers.LlamaModel(config).eval(), torch.randint(60, (2, 29)))
    assert found["entropy"].isfinite().all()


def test_tokens_outside_the_vocabulary_are_seen_before_the_model_runs() -> None:
    with pytest.raises(OptionError, match=f"tokens from 5 to {VOCABULARY}"):
        scan(bert(), {"input_ids": torch.tensor([[5, VOCABULARY]])})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[3, 4] = value
    with pytest.raises(OptionError, match=r"layer\.1\.\S+\.key\.weight holds 1 of 1,600"):
        scan(model, text())


@pytest.mark.parametrize("given", [[], "a text", None])
def test_inputs_of_no_known_form(given: Any) -> None:
    with pytest.raises(OptionError, match="needed"):
        scan(bert(), given)


@pytest.mark.parametrize("make", others_extra([bert, gpt2]))
def test_no_tensor_is_queries_by_keys(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**14)
    length, real = 1024, torch.tensor([1024, 700])
    ids, model = tokens(2, length), make().float()
    padding = (torch.arange(length) < real[:, None]).long()
    given = {"input_ids": ids, "attention_mask": padding}
    positions = model.transformer.wpe if make is gpt2 else model.embeddings.position_embeddings
    positions.weight = nn.Parameter(torch.randn(length, WIDTH))
    if make is bert:
        model.embeddings.position_ids = torch.arange(length)[None]
        model.embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    kept = []

    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        with LargestTensor() as seen:
            model(*args, **kwargs)
        kept.append(seen)

    # Those that write some rows down, up to 64 or 256 of each head, are left out.
    sampled = {"head_distance", "total_variation", "cka", "copying", "top_keys"}
    statistics = [s for s in STANDARD if s.definition.name not in sampled]
    scan(model, given, call=call, statistics=statistics)
    # A bool for each query and key of each sequence would take as much.
    assert kept[0].bytes < len(ids) * length * length, kept[0].name


def test_a_mask_of_ones_own() -> None:
    """What is hidden by a clause over keys alone is padding; a causal mask hides nothing so."""
    q = torch.randn(BATCH, HEADS, LENGTH, 8).double()
    keys = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keys[1, :4] = False
    mask = Mask.causal() & Mask.may_attend(keys, axes="batch keys")
    found = scan(AttentionMatrix(q, q, mask=mask), q, statistics=["first_token"])
    alone = scan(
        AttentionMatrix(q[1:, :, 4:], q[1:, :, 4:], mask=Mask.causal()),
        q[1:, :, 4:],
        statistics=["first_token"],
    )
    whole = scan(
        AttentionMatrix(q[:1], q[:1], mask=Mask.causal()), q[:1], statistics=["first_token"]
    )
    close(found["first_token"], whole.merge(alone)["first_token"])
    assert found.tokens == 2 * LENGTH - 4


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 40))
    with pytest.raises(OptionError, match=r"0\.weight on the meta device"):
        scan(model, torch.randn(1, 24, 40))


def test_hooks_of_others_run_in_a_scan_as_always() -> None:
    """A scan edits nothing itself, and shows a model that hooks edit."""
    model = tiny.load()
    ids = tiny.encode("the quick brown fox jumps over the lazy dog. " * 3)[None]
    plain = scan(model, ids, statistics=["entropy"])["entropy"]
    hook = model.blocks[0].register_forward_hook(
        lambda module, given, output: torch.zeros_like(output)
    )
    edited = scan(model, ids, statistics=["entropy"])["entropy"]
    hook.remove()
    again = scan(model, ids, statistics=["entropy"])["entropy"]
    assert torch.equal(plain[0], edited[0])
    assert (edited[1:] - plain[1:]).abs().min() > 0.1
    assert torch.equal(again, plain)


def test_arrays_of_numpy_have_a_line_that_makes_tensors() -> None:
    array = tokens(1, LENGTH).numpy()
    mask = {"input_ids": torch.as_tensor(array), "attention_mask": array}
    for given in (array, (array,), {"input_ids": array}, mask, (torch.as_tensor(array), [array])):
        for call in (None, lambda model, *ids, **named: model.generate(*ids, **named)):
            with pytest.raises(OptionError, match=r"do:     torch\.as_tensor\(array\)"):
                scan(gpt2(), given, call=call)
