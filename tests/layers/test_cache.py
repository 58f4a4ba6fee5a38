"""The cache as a value: what is held after prefill, steps, eviction, and gaps that close."""

import pytest
import torch
from torch import Tensor

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layers.cache import Cache

BATCH, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 2, 5, 7


def empty(slots: int, *, window: int | None = None) -> Cache:
    return Cache(
        torch.full((BATCH, KV_HEADS, slots, HEAD_DIM), torch.nan),
        torch.full((BATCH, KV_HEADS, slots, VALUE_DIM), torch.nan),
        window=window,
    )


def tokens(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values that say which token, sequence and kv head they are of."""
    name = (
        torch.arange(first, first + count)[None, None, :]
        + 1000 * torch.arange(BATCH)[:, None, None]
    )
    name = (name + 100_000 * torch.arange(KV_HEADS)[None, :, None]).float()[..., None]
    return name.expand(-1, -1, -1, HEAD_DIM).clone(), -name.expand(-1, -1, -1, VALUE_DIM).clone()


def names(held: Tensor, sequence: int = 0) -> list[int]:
    assert (held == held[..., :1]).all()
    assert ((held[:, 1] - held[:, 0]).abs() == 100_000).all()
    return [int(x) % 1000 for x in held[sequence, 0, :, 0].abs()]


def test_steps_are_read_in_order_and_share_the_buffers_memory() -> None:
    cache = empty(9)
    first = cache.append(*tokens(0, 4))
    assert names(first.k) == [0, 1, 2, 3]
    step = cache.append(*tokens(4, 1))
    many = cache.append(*tokens(5, 3))
    assert names(step.k) == [0, 1, 2, 3, 4]
    assert names(many.k) == names(many.v) == list(range(8))
    assert names(many.k, sequence=2) == list(range(8))
    assert many.starts is None
    # A step is written in place: what was read before is the same memory.
    assert first.k.data_ptr() == many.k.data_ptr()
    assert (cache.length, cache.seen) == (8, 8)


def test_a_full_cache_refuses_and_keeps_what_it_holds() -> None:
    cache = empty(5)
    cache.append(*tokens(0, 4))
    with pytest.raises(OptionError, match=r"2 more tokens for a cache that holds 4 of 5") as error:
        cache.append(*tokens(4, 2))
    assert "length=6" in str(error.value)
    assert names(cache.append(*tokens(4, 1)).k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("slots", [4, 5, 9])
@pytest.mark.parametrize("steps", [(1,) * 12, (2, 1, 3, 3, 1, 2), (7, 1, 1, 3), (12,), (3, 9)])
def test_a_window_keeps_what_a_query_can_see(slots: int, steps: tuple[int, ...]) -> None:
    cache, seen, window = empty(slots, window=3), 0, 3
    for step in steps:
        held = cache.append(*tokens(seen, step))
        read = names(held.k)
        seen += step
        assert read == names(held.v)
        assert read == list(range(seen - len(read), seen))
        assert len(read) >= min(seen, step + window)
        assert cache.seen == seen
        assert cache.length <= slots


def test_sequences_of_unequal_lengths_end_together() -> None:
    cache = empty(12)
    # The last 4, 2 and 3 of four new tokens are real.
    held = cache.append(*tokens(0, 4), lengths=torch.tensor([4, 2, 3]))
    assert held.starts.tolist() == [0, 2, 1]
    assert names(held.k)[0:] == [0, 1, 2, 3]
    assert names(held.k, 1)[2:] == [2, 3]
    assert names(held.k, 2)[1:] == [1, 2, 3]
    held = cache.append(*tokens(10, 1))
    assert held.starts.tolist() == [0, 2, 1]
    assert names(held.k, 1)[2:] == [2, 3, 10]
    # Again unequal: the tokens held move up to the new ones.
    held = cache.append(*tokens(20, 3), lengths=torch.tensor([1, 3, 0]))
    assert held.starts.tolist() == [2, 2, 4]
    assert names(held.k, 0)[2:] == [0, 1, 2, 3, 10, 22]
    assert names(held.k, 1)[2:] == [2, 3, 10, 20, 21, 22]
    assert names(held.k, 2)[4:] == [1, 2, 3, 10]
    assert names(held.v, 2)[4:] == [1, 2, 3, 10]


def test_a_window_forgets_where_unequal_sequences_began() -> None:
    cache = empty(5, window=2)
    cache.append(*tokens(0, 4), lengths=torch.tensor([4, 1, 2]))
    held = cache.append(*tokens(4, 2))
    # Two of the four are kept: the second sequence's only one is the last of them.
    assert names(held.k) == [2, 3, 4, 5]
    assert held.starts.tolist() == [0, 1, 0]


def test_select_is_a_cache_of_its_own() -> None:
    cache = empty(6)
    cache.append(*tokens(0, 2), lengths=torch.tensor([2, 1, 2]))
    chosen = cache.select(torch.tensor([1, 1, 0]))
    held = chosen.append(*tokens(2, 1))
    assert held.starts.tolist() == [1, 1, 0]
    assert held.k[1, 0, 1, 0] == 1001
    assert (cache.length, chosen.length) == (2, 3)
    assert torch.isnan(cache._k[:, :, 2]).all()


def test_clear_forgets() -> None:
    cache = empty(3, window=1)
    cache.append(*tokens(0, 3), lengths=torch.tensor([1, 2, 3]))
    cache.append(*tokens(3, 2))
    cache.clear()
    assert (cache.length, cache.seen, cache.starts) == (0, 0, None)
    assert names(cache.append(*tokens(0, 2)).k) == [0, 1]


def test_what_does_not_fit_is_refused(shapes_unchecked: None) -> None:
    cache = empty(4)
    k, v = tokens(0, 1)
    with pytest.raises(ShapeError, match=r"keys of shape \(3, 1, 1, 5\)"):
        cache.append(k[:, :1], v)
    with pytest.raises(ShapeError, match=r"values of shape \(2, 2, 1, 7\)"):
        cache.append(k, v[:2])
    with pytest.raises(DTypeError, match=r"torch.float64 for a cache of torch.float32"):
        cache.append(k.double(), v.double())
    with pytest.raises(OptionError, match="require a gradient"):
        cache.append(k.requires_grad_(), v)
    with pytest.raises(ShapeError, match=r"lengths of shape \(2,\)"):
        cache.append(k.detach(), v, lengths=torch.tensor([1, 1]))
    assert cache.length == 0


def test_repr_names_its_sizes() -> None:
    cache = empty(9, window=4)
    cache.append(*tokens(0, 2))
    assert repr(cache) == (
        "Cache(batch=3, kv_heads=2, head_dim=5, value_dim=7, float32, 2 of 9 slots, 2.6 kB, "
        "window 4, 0 dropped)"
    )
