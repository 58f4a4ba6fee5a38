"""Times: what is run, in which order, and on how many threads; never how long it took."""

import pytest
import torch

from headwise.study.measures import relative_times


def test_all_run_in_every_round_forwards_and_backwards() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    found = relative_times(works, against="b", rounds=3)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"  # the first is the warm-up
    assert found.keys() == works.keys()
    assert found["b"] == 1


def test_one_thread_and_then_as_before() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        relative_times({"a": fail}, against="a", rounds=1)
    assert seen == [1]
    assert torch.get_num_threads() == before
