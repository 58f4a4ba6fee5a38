"""The table of Hugging Face classes: it is whole, what a fresh trial finds, and able to fail."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.checkpoints import config as configs
from headwise.function.budget import Budget
from headwise.huggingface import attention
from tools.huggingface_classes import classes, comparing, layers, shrink, stored, table, trial

# Of every verdict, and of every way by which layers are reached.
SAMPLE = [
    "bert",
    "clip",
    "deberta-v2",
    "deformable_detr",
    "falcon",
    "gpt_oss",
    "mamba",
    "sam_prompt_encoder",
    "t5",
    "vit",
]
STABLE = [
    "class_name",
    "verdict",
    "implementation",
    "ran",
    "seen",
    "reached",
    "idle",
    "layout",
    "layout_by",
]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found = table.record()
    if found["versions"]["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {found['versions']['transformers']}")
    return found


@pytest.fixture(scope="module")
def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["model_type"]: row for row in record["rows"]}


def test_no_model_type_of_the_installed_version_is_missing(rows: dict[str, Any]) -> None:
    assert sorted(rows) == classes.model_types()


def test_every_row_has_a_class_or_says_so(rows: dict[str, Any]) -> None:
    nameless = {name for name, row in rows.items() if "class_name" not in row}
    assert {rows[name]["verdict"] for name in nameless} == {trial.NO_CLASS}


def test_at_least_150_classes_are_seen_in_all_layers_within_the_budget(
    rows: dict[str, Any],
) -> None:
    seen = [row for row in rows.values() if row["verdict"] == trial.ALL]
    assert len(seen) >= 150
    assert all(row["ratio"] <= 1 and row["seen"] == row["ran"] for row in seen)


def test_what_is_not_seen_has_a_reason(rows: dict[str, Any]) -> None:
    other = (trial.ALL, trial.NONE, trial.NO_CLASS)
    assert [
        n for n, row in rows.items() if row["verdict"] not in other and "reason" not in row
    ] == []


def test_no_run_contradicts_the_layout_that_a_config_says(rows: dict[str, Any]) -> None:
    told = Counter(row["layout_by"] for row in rows.values() if "layout_by" in row)
    assert not told[stored.REFUTED]
    assert told[stored.BY_RUN] > 100


def test_the_page_is_written_from_the_record(record: dict[str, Any]) -> None:
    assert table.PAGE.read_text("utf-8") == table.page(record)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_a_fresh_trial_finds_what_the_table_says(model_type: str, rows: dict[str, Any]) -> None:
    fresh = trial.tried(model_type).record()
    assert {n: fresh.get(n) for n in STABLE} == {n: rows[model_type].get(n) for n in STABLE}
    assert fresh.get("ratio", 0.0) <= 1


# ---- it can fail -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_attention_that_forgets_its_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.attend

    def maskless(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Any:
        return original(module, q, k, v, None, **{**options, "is_causal": False})

    monkeypatch.setattr(attention, "attend", maskless)
    row = trial.tried("bert")
    assert row.verdict == trial.DIFFERS
    assert row.ratio is not None
    assert row.ratio > 1


@pytest.mark.filterwarnings("ignore")
def test_a_table_that_says_another_layout_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohere has Llama's names, and rotates other channels together."""
    model = trial.built(transformers.LlamaModel, trial.Row("llama", None))
    assert model is not None
    assert stored.layout_of(model) == ("llama", stored.BY_RUN)
    monkeypatch.setitem(configs._LAYOUTS, "llama", "cohere")
    assert stored.layout_of(model) == ("cohere", stored.REFUTED)


class Mixer(nn.Module):
    """Attention by its own code, under a name that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.projection(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)


class LinearAttention(Mixer):
    """A name that says attention, and no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.projection(x)
        return q @ (q.mT @ q)


def test_layers_are_found_by_what_runs() -> None:
    model = nn.Sequential(Mixer(), LinearAttention(), nn.MultiheadAttention(8, 2))
    x = torch.randn(3, 5, 8)

    def run() -> None:
        model[1](model[0](x))

    with torch.no_grad():
        ran = layers.observed(nn.ModuleDict({"whole": model}), run)[1]
    assert ran.layers == {"whole.0": "Mixer"}
    assert ran.times == Counter({"whole.0": 1})
    assert ran.without_softmax == ["LinearAttention"]
    assert ran.idle == {"whole.2": "MultiheadAttention"}


def test_padding_is_not_compared_and_a_nan_is_not_equal() -> None:
    mask = torch.tensor([[1, 1, 0]])
    x = torch.tensor([[[1.0], [2.0], [torch.nan]]])
    found = comparing.outputs({"states": x, "more": (x,)}, {"attention_mask": mask})
    assert {name: y.flatten().tolist() for name, y in found.items()} == {
        "states": [1.0, 2.0],
        "more.0": [1.0, 2.0],
    }
    exact = torch.ones(2, dtype=torch.float64)
    budget = Budget("states", torch.float32, exact, torch.zeros(2, dtype=torch.float64), ("n",))
    worst = comparing.verdict({"states": budget}, {"states": torch.tensor([1.0, torch.nan])})
    assert worst is not None
    assert not worst.within


def test_one_layer_of_each_kind_is_kept() -> None:
    config = shrink.shrunk(transformers.Gemma3TextConfig)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.num_hidden_layers, config.hidden_size) == (2, shrink.WIDTH)
