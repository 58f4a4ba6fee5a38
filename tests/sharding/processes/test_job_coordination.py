"""The store of a job, its signs of life and its failures; ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from headwise.errors import HeadwiseError, LostProcessError, OptionError
from headwise.sharding.processes.job import Job
from headwise.sharding.processes.signs import StoreCalls

LONG, SHORT = 30.0, 1.0  # timeouts; a store may need 0.1 s on a busy machine


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def job(server: TCPStore, rank: int, count: int, timeout: float = LONG, **options: Any) -> Job:
    store: Store = TCPStore("localhost", server.port, is_master=False)
    return Job(store, rank=rank, count=count, timeout=timeout, **options)


def on_ranks(server: TCPStore, count: int, work: Callable[[Job], Any]) -> list[Any]:
    """What the work returns on each rank, or the error that it raises."""

    def on_rank(rank: int) -> Any:
        try:
            with job(server, rank, count) as mine:
                return work(mine)
        except HeadwiseError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(on_rank, range(count)))


def test_each_number_is_taken_once(server: TCPStore) -> None:
    def take(mine: Job) -> list[int]:
        numbers = []
        while (number := mine.take_next_number("document")) < 40:
            numbers.append(number)
        return numbers

    taken = on_ranks(server, 3, take)
    assert sorted(number for numbers in taken for number in numbers) == list(range(40))


def test_a_barrier_holds_until_the_last_rank_has_come(server: TCPStore) -> None:
    here: list[int] = []

    def come(mine: Job) -> int:
        time.sleep(0.1 * mine.rank)
        here.append(mine.rank)
        mine.barrier("all")
        return len(here)

    assert on_ranks(server, 3, come) == [3, 3, 3]


def test_other_values_on_a_rank_are_refused_on_every_rank(server: TCPStore) -> None:
    def compare(mine: Job) -> None:
        mine.require_same({"weights": "ab", "documents": "cd" if mine.rank < 2 else "ce"})

    errors = on_ranks(server, 3, compare)
    assert {type(error) for error in errors} == {OptionError}
    assert {error.saw for error in errors} == {
        "documents of rank 2, which differs from documents of rank 0"
    }
    assert on_ranks(server, 1, lambda mine: mine.require_same({"weights": "ab"})) == [None]


def test_a_failure_reaches_the_other_ranks(server: TCPStore) -> None:
    def fail(mine: Job) -> None:
        if mine.rank == 1:
            raise OptionError(saw="no such text", needed="a text", do="name one")
        mine.wait_for_announcement("nothing that is announced")

    mine, failed, other = on_ranks(server, 3, fail)
    assert failed.saw == "no such text"
    assert type(mine) is type(other) is LostProcessError
    assert mine.saw == other.saw == "rank 1 of 3 failed: no such text"


def test_the_first_failure_counts(server: TCPStore) -> None:
    first, second = job(server, 0, 2), job(server, 1, 2)
    assert first.record_failure("disk full", status=2) == (0, 2, "disk full")
    assert second.record_failure("lost", status=75) == (0, 2, "disk full")


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_rank_without_signs_of_life_is_lost(server: TCPStore, has_begun: bool) -> None:
    """Of ranks 1 and 2, which are gone, rank 0 notices the next one."""
    if has_begun:
        server.add("signs/1", 3)
    noticed: list[LostProcessError] = []
    with (
        pytest.raises(LostProcessError) as caught,
        job(server, 0, 3, timeout=SHORT, on_lost=noticed.append) as mine,
    ):
        mine.wait_for_announcement("nothing that is announced")
    words = "given no sign of life" if has_begun else "not begun"
    assert caught.value.saw.startswith(f"rank 1 of 3 has {words} for ")
    assert noticed == [caught.value]


def test_a_rank_that_stops_at_its_end_is_lost(server: TCPStore) -> None:
    server.add("signs/1", 3)
    with (
        pytest.raises(LostProcessError, match="rank 1 of 2 has given no sign of life"),
        job(server, 0, 2, timeout=SHORT),
    ):
        pass  # the work of rank 0, which does not leave alone


def test_ranks_leave_together_and_rank_0_last(server: TCPStore) -> None:
    ended: list[int] = []

    def close(mine: Job) -> None:
        time.sleep(0.3 * mine.rank)
        ended.append(mine.rank)
        mine.leave_when_all_done()
        assert sorted(ended) == [0, 1, 2]
        if mine.rank == 0:
            assert mine.add_to_counter("arrived/left", 0) == 3
        mine.close()

    jobs = [job(server, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(close, (each.__enter__() for each in jobs)))


class Gone:
    """A store whose process has ended."""

    def clone(self) -> Gone:
        return self

    def add(self, *_: Any) -> int:
        raise RuntimeError("Connection reset by peer\nframe #0: ...")

    check = compare_set = add


def test_a_store_that_is_gone() -> None:
    noticed = Event()
    gone: Any = Gone()
    mine = job_of(gone, on_lost=lambda _: noticed.set()).__enter__()
    assert noticed.wait(10)
    with pytest.raises(LostProcessError, match="is gone: Connection reset by peer\n"):
        mine.require_all_ranks_alive()
    with pytest.raises(LostProcessError, match="failed: Connection reset by peer\n"):
        mine.add_to_counter("document", 1)
    assert mine.record_failure("an error of this rank") is None
    with pytest.raises(LostProcessError, match="failed: Connection reset by peer\n"):
        mine.leave_when_all_done()
    mine.close()


def job_of(store: Any, **options: Any) -> Job:
    return Job(store, rank=0, count=2, timeout=SHORT, **options)


def test_a_store_that_does_not_answer() -> None:
    class Stopped:
        def get(self, name: str) -> None:
            Event().wait()

    stopped: Any = Stopped()
    with pytest.raises(LostProcessError, match=r"has not answered for 0\.1 s"):
        StoreCalls(stopped, 0.1)("get", "name")
