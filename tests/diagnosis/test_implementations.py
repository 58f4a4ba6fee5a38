"""`compare` between attention implementations of transformers, on models with the same weights."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaModel, OPTConfig, OPTModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.implementations import trial
from headwise import compare, register_huggingface
from headwise.diagnosis.subjects import run
from headwise.function.rounding import exceeds_rounding, relative_difference_norm
from headwise.identify.comparison import ModelComparison
from headwise.identify.results import Verdict
from tests.quick import others_extra

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own code, for flex
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
LAYERS = ["layers.0.self_attn", "layers.1.self_attn"]
WRONG = "scaled by two"


def scaled_by_two(*operands: Any, scaling: float, **options: Any) -> Any:
    return sdpa_attention_forward(*operands, scaling=2 * scaling, **options)


@pytest.fixture(autouse=True)
def wrong_implementation() -> Iterator[None]:
    register_huggingface()
    AttentionInterface.register(WRONG, scaled_by_two)
    yield
    del AttentionInterface._global_mapping[WRONG]


def model(implementation: str) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    built = LlamaModel(config)
    built.config._attn_implementation = implementation
    return built


def texts(*, padding: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": torch.randint(97, (2, 12)), "attention_mask": mask}


def compared(first: str, second: str, **inputs: Any) -> tuple[Verdict, ModelComparison]:
    diagnosis = compare(model(first), model(second), texts(**inputs))
    assert diagnosis.model is not None
    return diagnosis.verdict, diagnosis.model


@pytest.mark.parametrize("second", ["sdpa", "headwise"])
def test_implementations_agree_without_padding(second: str) -> None:
    assert compared("eager", second)[0] is Verdict.TO_ROUNDING


@pytest.mark.parametrize(
    "second", others_extra(["headwise", "sdpa", "flex_attention"], quick=["headwise"])
)
def test_rows_of_padding_differ_from_eager(second: str) -> None:
    verdict, comparison = compared("eager", second, padding=4)
    assert verdict is Verdict.DIFFERENT
    assert comparison.has_other_output
    assert [layer.name for layer in comparison.differing_layers] == LAYERS
    assert comparison.cause_names == ["rows without keys"]
    assert not comparison.unexplained_places
    assert not any(layer.is_of_second for layer in comparison.layers)


@pytest.mark.extra
def test_the_cause_may_be_in_the_second() -> None:
    diagnosis = compare(model("sdpa"), model("eager"), texts(padding=4))
    assert diagnosis.model is not None
    assert diagnosis.model.cause_names == ["rows without keys"]
    assert all(layer.is_of_second for layer in diagnosis.model.differing_layers)
    assert "rows without keys: row equal weights in the second" in str(diagnosis)


@pytest.mark.slow
def test_an_implementation_with_another_scale_is_named() -> None:
    verdict, comparison = compared(WRONG, "sdpa")
    assert verdict is Verdict.DIFFERENT
    assert [layer.name for layer in comparison.differing_layers] == LAYERS
    assert comparison.cause_names == ["scale"]


def test_two_that_run_otherwise_than_stated_and_alike_are_the_same() -> None:
    verdict, comparison = compared(WRONG, WRONG)
    assert verdict is Verdict.SAME
    assert not comparison.differing_layers


def test_layers_without_a_layout_are_compared_by_their_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "read_attention_modules", lambda model: [])
    verdict, comparison = compared("eager", "sdpa", padding=4)
    assert verdict is Verdict.UNKNOWN
    [layer] = comparison.differing_layers
    assert (layer.name, [stage.stage for stage in layer.comparison.parted]) == (
        LAYERS[0],
        ["head outputs"],
    )
    assert comparison.layers[1].note
    assert compared("eager", "sdpa")[0] is Verdict.TO_ROUNDING


def test_the_interface_is_as_before() -> None:
    before = AttentionInterface.get_interface
    compared("eager", "sdpa")
    assert AttentionInterface.get_interface is before


@pytest.mark.slow
def test_one_attention_module_runs_its_own_implementation() -> None:
    layers = [model(name).layers[0].self_attn.eval() for name in (WRONG, "sdpa")]
    function = compare(*layers).function
    assert function is not None
    assert function.cause_names == ["scale"]


def test_nan_beside_a_number_is_an_infinite_gap() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    assert relative_difference_norm(x, x.clone()) == 0
    assert relative_difference_norm(x, x.nan_to_num()) == torch.inf
    assert relative_difference_norm(x.nan_to_num(), x) == torch.inf


@pytest.mark.extra
def test_the_bench_has_a_row_for_each_pair_and_padding() -> None:
    rows = trial.tried("llama")
    assert {row["class_name"] for row in rows} == {"LlamaModel"}
    verdicts = {(row["pair"].split()[-1], row["padding"]): row["verdict"] for row in rows}
    expected = {"none": "same to rounding", "right": "same to rounding", "left": "different"}
    for second in ("sdpa", "flex_attention"):
        assert {p: verdicts[second, p] for p in expected} == expected
    for row in rows:
        is_left = row["padding"] == "left"
        assert (row["gap"] > 0.1) == is_left
        assert row["real_gap"] < 1e-5
        assert row["causes"] == (["rows without keys"] if is_left else [])


@pytest.mark.extra
def test_queries_that_are_scaled_before_the_interface_are_read_as_stated() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "ffn_dim": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    first = OPTModel(OPTConfig(vocab_size=97, word_embed_proj_dim=48, **sizes))
    second = copy.deepcopy(first)
    first.set_attn_implementation("eager")
    second.set_attn_implementation("sdpa")
    comparison = compare(first, second, texts(padding=4)).model
    assert comparison is not None
    assert comparison.cause_names == ["rows without keys"]
    assert not comparison.unexplained_places


class TwoOutputs(nn.Module):
    """A model whose second output alone shows what its attention does."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.inner = model(implementation)
        self.config = self.inner.config

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(**inputs).last_hidden_state
        return {"first": hidden[:, -1:], "second": hidden}


@pytest.mark.extra
def test_all_outputs_of_a_model_are_compared() -> None:
    diagnosis = compare(TwoOutputs("eager"), TwoOutputs("sdpa"), texts(padding=4))
    assert diagnosis.verdict in (Verdict.DIFFERENT, Verdict.UNKNOWN)
    assert diagnosis.model is not None
    assert diagnosis.model.output_gap > 0.1


def test_numbers_that_one_of_two_loses_in_float32_are_a_difference() -> None:
    assert exceeds_rounding(0.0, torch.inf, 1e-7)
    assert exceeds_rounding(0.0, 1e-7, torch.inf)
    assert not exceeds_rounding(0.0, torch.inf, torch.inf)
    assert not exceeds_rounding(1e-8, 1e-7, 0.0)
    assert exceeds_rounding(1e-6, 1e-7, 0.0)
