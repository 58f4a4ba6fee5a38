"""Pruning of the model that ships, on Python that it has not seen: its induction head stays."""

import re

import pytest
from torch import Tensor
from torch.nn import functional as F

from headwise.models import tiny
from headwise.models.tiny import Tiny
from headwise.surgery import Pruning, plan_prune
from tools.surgery_pictures import IMAGES, curve_of, prune_tiny, read_ports
from tools.tiny.batches import repeated_bytes

MEASURED = tiny.training_measurements()
PAIR = [MEASURED["previous_token"], MEASURED["induction"]]  # the circuit that copies
COPY = 96  # bytes
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def pruned() -> Pruning:
    return prune_tiny()


def copies() -> Tensor:
    return repeated_bytes(batch=4, bytes=COPY)


def losses(model: Tiny) -> tuple[float, float]:
    """The mean loss of random bytes, and of the same bytes once more."""
    ids = copies()
    nats = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    return float(nats[:, :COPY].mean()), float(nats[:, COPY + 1 :].mean())


def assert_stays(gone: dict[str, list[int]]) -> None:
    for head in PAIR:
        assert head["head"] not in gone.get(f"blocks.{head['layer']}.attention.", [])


@pytest.mark.slow
def test_gradients_keep_the_heads_that_copy() -> None:
    to_fit, held_out = (part[:8] for part in read_ports())
    plan = plan_prune(tiny.load(), to_fit, held_out=held_out, keep=0.5, by="gradient")
    assert plan.choice.kept() == 16
    assert_stays(plan.gone)


@pytest.mark.extra
def test_half_of_the_heads_copy_what_all_copied(pruned: Pruning) -> None:
    assert pruned.plan.choice.kept() == 16
    assert_stays(pruned.plan.gone)
    # They are among the last four of all: no number of heads on the curve lacks them.
    assert_stays(pruned.plan.choice.gone(len(pruned.plan.choice.steps)))
    layer = MEASURED["induction"]["layer"]
    scores = pruned.model.matrices(copies())[layer].diagonal(1 - COPY)[..., -COPY:].mean((0, 2))
    left = pruned.cut.layers[f"blocks.{layer}.attention."].origins.query
    assert left[int(scores.argmax())] == MEASURED["induction"]["head"]
    assert float(scores.max()) > 0.5  # more than half of the weight is on the byte that follows
    first, second = losses(pruned.model)
    assert second < first / 2


@pytest.mark.extra
def test_that_head_copies_more_than_the_sixteen_that_go(pruned: Pruning) -> None:
    model = tiny.load()
    head = MEASURED["induction"]
    layer = model.block_list()[head["layer"]].attention
    rows = slice(head["head"] * layer.value_dim, (head["head"] + 1) * layer.value_dim)
    layer.out_proj.weight[:, rows] = 0
    assert losses(model)[1] > 2 * losses(pruned.model)[1]


@pytest.mark.extra
def test_the_curve_is_that_of_the_documentation(pruned: Pruning) -> None:
    drawn, shown = curve_of(pruned), IMAGES.joinpath("tiny.svg").read_text("utf-8")
    assert NUMBER.sub("#", drawn) == NUMBER.sub("#", shown), "look, then: make pictures"
    for new, old in zip(NUMBER.findall(drawn), NUMBER.findall(shown), strict=True):
        # Of a point: about 0.0002 nats, which is more than float32 rounds and less than a change.
        assert abs(float(new) - float(old)) <= 0.01, "look, then: make pictures"
