"""The small language model that ships: what its file holds, what it has learned, and its heads."""

import json
import math
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors_in
from torch import Tensor
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.models import tiny
from headwise.models.tiny import TRAINING, WEIGHTS, TinySizes
from headwise.study.measures import count_parameters
from tools.tiny import measures
from tools.tiny.batches import repeated_bytes

FILES = resources.files("headwise.models.tiny")
MOST_BYTES = 8_000_000
# What is the same but for the order of summation parts by less than this in float64.
SAME = torch.finfo(torch.float32).eps
TEXT = Path(__file__).read_bytes()  # Python that it has never seen


@pytest.fixture(scope="module")
def model() -> tiny.Tiny:
    return tiny.load()


@pytest.fixture(scope="module")
def exact() -> tiny.Tiny:
    return tiny.load().double()


def windows(text: bytes, size: int = 255) -> Tensor:
    """The begin symbol and ``size`` bytes in each row; the rest of the text is left out."""
    rows = [text[i : i + size] for i in range(0, len(text) - size + 1, size)]
    return torch.stack([tiny.encode(row) for row in rows])


# ---- the file ----------------------------------------------------------------------------------


def test_the_file_is_small_and_what_training_says(model: tiny.Tiny) -> None:
    raw = FILES.joinpath(WEIGHTS).read_bytes()
    assert {t.dtype for t in tensors_in(raw).values()} == {torch.float16}
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert not model.training
    said = tiny.training_measurements()
    assert said == json.loads(FILES.joinpath(TRAINING).read_text("utf-8"))
    assert len(raw) == said["file_bytes"] <= MOST_BYTES
    assert count_parameters(model) == said["parameters"]
    assert model.sizes._asdict() == said["plan"]["sizes"]
    assert said["tokens"] == said["steps"] * said["plan"]["batch"] * said["plan"]["length"]
    assert [point["step"] for point in said["curve"]] == list(range(100, said["steps"] + 1, 100))


def test_its_layers_are_the_library_s(model: tiny.Tiny) -> None:
    assert len(model.blocks) == TinySizes().num_layers
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        assert block.attention.rotary is not None


def test_text_goes_there_and_back() -> None:
    ids = tiny.encode("naïve")
    assert ids.tolist() == [tiny.BEGIN, *"naïve".encode()]
    assert tiny.decode(ids) == "naïve"
    assert tiny.decode(torch.tensor([255])) == "\ufffd"
    with pytest.raises(OptionError, match="the id 257"):
        tiny.decode(torch.tensor([65, 257]))


# ---- what it has learned -----------------------------------------------------------------------


def in_sample_bits(text: bytes, *, context: int) -> float:
    """Bits for each byte of a table of counts that was made from this very text."""
    pairs = Counter((text[max(0, i - context) : i], text[i]) for i in range(len(text)))
    before = Counter(text[max(0, i - context) : i] for i in range(len(text)))
    bits = sum(-count * math.log2(count / before[key]) for (key, _), count in pairs.items())
    return bits / len(text)


@pytest.mark.slow
def test_it_foretells_unseen_text_better_than_counts_of_that_text(model: tiny.Tiny) -> None:
    ids = windows(TEXT)
    nats = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
    bits = float(nats) / math.log(2)
    assert bits < in_sample_bits(TEXT, context=1) < in_sample_bits(TEXT, context=0)


def test_what_was_measured_holds(model: tiny.Tiny) -> None:
    said = tiny.training_measurements()
    # Measured on the same bytes here, whatever this Python's library is.
    found = measures.best_head(measures.induction_scores(model))
    assert (found.layer, found.head) == (said["induction"]["layer"], said["induction"]["head"])
    assert abs(found.score - said["induction"]["score"]) < 2e-4  # four decimals are written


# ---- its heads ---------------------------------------------------------------------------------


def test_a_head_looks_at_the_byte_before(exact: tiny.Tiny) -> None:
    ids = windows(TEXT)[:4]
    scores = measures.previous_token_scores(exact, ids)
    dense = torch.stack([matrix.dense() for matrix in exact.matrices(ids)])
    before = dense.diagonal(-1, -2, -1).mean((1, 3))
    assert float((scores - before).abs().max()) <= SAME
    assert float(scores.max()) >= 0.9
    assert measures.best_head(scores).head == int(before.flatten().argmax()) % TinySizes().num_heads


def test_a_head_finds_what_followed_before(exact: tiny.Tiny) -> None:
    copy = 31
    ids = repeated_bytes(batch=3, bytes=copy)
    scores = measures.induction_scores(exact, batch=3, copy=copy)
    dense = torch.stack([matrix.dense() for matrix in exact.matrices(ids)])
    found = []
    for row, text in enumerate(ids.tolist()):
        for query in range(1 + copy, 1 + 2 * copy):
            first = text.index(text[query])
            assert first < query  # and this byte stands nowhere else before
            found.append(dense[:, row, :, query, first + 1])
    by_hand = torch.stack(found).mean(0)
    assert float((scores - by_hand).abs().max()) <= SAME
    assert float(scores.max()) >= 0.4


def test_what_is_repeated_is_foretold(model: tiny.Tiny) -> None:
    copy = 96
    ids = repeated_bytes(batch=4, bytes=copy)
    nats = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    # Random bytes cost 8 bits each; the second copy is half as dear, or less.
    assert float(nats[:, copy + 1 :].mean()) < float(nats[:, :copy].mean()) / 2


# ---- causality and padding ---------------------------------------------------------------------


def test_padding_and_later_bytes_change_nothing(exact: tiny.Tiny) -> None:
    ids, lengths = windows(TEXT, 83)[:3], torch.tensor([84, 29, 1])
    padded = exact(ids, lengths=lengths)
    matrices = exact.matrices(ids, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = exact(ids[row : row + 1, :length])
        assert float((padded[row, :length] - alone[0]).abs().max()) <= SAME
        for matrix in matrices:
            assert not matrix.dense()[row, :, length:].any()
    assert float((padded[0] - exact(ids)[0]).abs().max()) <= SAME


def test_forward_is_what_the_matrices_say(model: tiny.Tiny) -> None:
    """The matrices are those of the forward pass, not of some other one."""
    ids, seen = windows(TEXT, 41)[:2], []
    handles = [
        block.attention.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        for block in model.block_list()
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    for block, x, matrix in zip(model.block_list(), seen, model.matrices(ids), strict=True):
        q = block.attention.q_proj(x).unflatten(-1, (block.attention.num_heads, -1))
        # Rotation keeps the length of each query.
        expected, found = q.transpose(1, 2).norm(dim=-1), matrix.q.norm(dim=-1)
        assert float((found / expected - 1).abs().max()) <= matrix.q.shape[-1] * SAME
