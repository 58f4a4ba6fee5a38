"""Files mutated at random: refused, or converted to exactly what they say now.

What they say is what the safetensors library reads in them. A mutation may make another valid file,
whose name or whose numbers are others: then its conversion is that of these.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from headwise.checkpoints.safetensors import read_safetensors_header as read_file
from headwise.errors import HeadwiseError
from tests.checkpoints import llamas

Chance = random.Random
MOST = 2**64 - 1


def flipped(raw: bytes, chance: Chance, start: int, stop: int) -> bytes:
    """Another byte in one to three places."""
    found = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        found[chance.randrange(start, stop)] = chance.randrange(256)
    return bytes(found)


def head_end(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def byte_of_the_head(raw: bytes, chance: Chance) -> bytes:
    return flipped(raw, chance, 8, head_end(raw))


def byte_of_the_length(raw: bytes, chance: Chance) -> bytes:
    return flipped(raw, chance, 0, 8)


def byte_of_the_numbers(raw: bytes, chance: Chance) -> bytes:
    return flipped(raw, chance, head_end(raw), len(raw))


def length(raw: bytes, chance: Chance) -> bytes:
    true = head_end(raw) - 8
    near = [true + n for n in (-9, -8, -1, 1, 8, 9)]
    return chance.choice([0, *near, len(raw), len(raw) - 8, MOST]).to_bytes(8, "little") + raw[8:]


def cut(raw: bytes, chance: Chance) -> bytes:
    return raw[: chance.choice([chance.randrange(len(raw)), chance.randrange(head_end(raw) + 1)])]


def longer(raw: bytes, chance: Chance) -> bytes:
    return raw + bytes(chance.randrange(1, 300))


def shifted(raw: bytes, chance: Chance) -> bytes:
    """A byte more or fewer somewhere in the head."""
    at = chance.randrange(head_end(raw))
    return (
        raw[:at] + (b"" if chance.random() < 0.5 else bytes([chance.randrange(256)])) + raw[at:][1:]
    )


def head_of(change: Callable[[dict[str, Any], Chance], None]) -> Callable[[bytes, Chance], bytes]:
    """A mutation of what the JSON says, with the right length before it."""

    def mutate(raw: bytes, chance: Chance) -> bytes:
        head = json.loads(raw[8 : head_end(raw)])
        change(head, chance)
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + raw[head_end(raw) :]

    return mutate


def tensor(head: dict[str, Any], chance: Chance) -> dict[str, Any]:
    found: dict[str, Any] = head[chance.choice([name for name in head if name != "__metadata__"])]
    return found


def dtype(head: dict[str, Any], chance: Chance) -> None:
    """Some are as wide: another valid file."""
    tensor(head, chance)["dtype"] = chance.choice(["F16", "I16", "F32", "U8", "F64", "F4", "x", 3])


def shape(head: dict[str, Any], chance: Chance) -> None:
    one = tensor(head, chance)
    old = one["shape"]
    one["shape"] = chance.choice(
        [
            old[::-1],
            [*old, 1],
            [1, *old],
            old[1:],
            [-n for n in old],
            [n + 1 for n in old],
            [0],
            None,
        ]
    )


def offsets(head: dict[str, Any], chance: Chance) -> None:
    one = tensor(head, chance)
    start, stop = one["data_offsets"]
    by = chance.choice([-80, -2, 2, 80, 10**9, 2**70])
    one["data_offsets"] = chance.choice(
        [[start + by, stop + by], [start, stop + by], [start + by, stop], [stop, start], [start]]
    )


def exchanged(head: dict[str, Any], chance: Chance) -> None:
    """Two tensors with the bytes of one another: valid where both have as many."""
    one, other = tensor(head, chance), tensor(head, chance)
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def name(head: dict[str, Any], chance: Chance) -> None:
    old = chance.choice([name for name in head if name != "__metadata__"])
    parts = old.split(".")
    parts[chance.randrange(len(parts))] = chance.choice(["0", "1", "5", "x", "", "self_attn", "é"])
    head[chance.choice([".".join(parts), old + ".bias", ""])] = head.pop(old)


def missing(head: dict[str, Any], chance: Chance) -> None:
    head.pop(chance.choice(list(head)))


def field(head: dict[str, Any], chance: Chance) -> None:
    one = tensor(head, chance)
    key = chance.choice(list(one))
    one[key] = chance.choice([None, [], {}, "BF16", 1.5, True, [1.0, 2.0], [[1]]])


def more(head: dict[str, Any], chance: Chance) -> None:
    """A tensor without numbers is valid anywhere; others need a place."""
    end = max(one["data_offsets"][1] for key, one in head.items() if key != "__metadata__")
    at = chance.choice([0, end, chance.randrange(end)])
    rows = chance.choice([0, 0, 2])
    head["more"] = {"dtype": "BF16", "shape": [rows], "data_offsets": [at, at + 2 * rows]}


def metadata(head: dict[str, Any], chance: Chance) -> None:
    head["__metadata__"] = chance.choice([{"a": "b"}, {"a": 1}, {}, [], None, {"a": None}, "x"])


MUTATIONS: dict[Callable[[bytes, Chance], bytes], int] = {
    byte_of_the_head: 150,
    byte_of_the_length: 30,
    byte_of_the_numbers: 15,
    length: 20,
    cut: 60,
    longer: 10,
    shifted: 60,
    head_of(dtype): 40,
    head_of(shape): 40,
    head_of(offsets): 40,
    head_of(exchanged): 40,
    head_of(name): 60,
    head_of(missing): 10,
    head_of(field): 40,
    head_of(more): 20,
    head_of(metadata): 10,
}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def outcome(source: Path, target: Path) -> bool:
    """Whether it was converted, and then rightly; refused, and then without a trace."""
    before, around = llamas.bytes_of(source), sorted(os.listdir(source.parent))
    try:
        llamas.to_meta(source, target)
    except HeadwiseError as error:
        refused = error
    else:
        refused = None
    assert llamas.bytes_of(source) == before
    if refused is not None:
        assert all([refused.saw, refused.needed, refused.do])
        assert sorted(os.listdir(source.parent)) == around
        return False
    said, made = llamas.read(source), llamas.read(target)
    expected = llamas.in_metas(said)
    others = {n: x for n, x in said.items() if n not in known(said)}
    llamas.assert_same(made, expected | others)
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return True


def known(state: llamas.State) -> set[str]:
    """The names that the closed form knows."""
    return {name for name in state if llamas.in_metas({name: state[name]})}


@pytest.mark.slow
def test_mutated_files(tmp_path: Path) -> None:
    whole = llamas.one_file(tmp_path / "whole.safetensors").read_bytes()
    place = tmp_path / "place"
    place.mkdir()
    source, chance = place / "a.safetensors", random.Random(0)
    converted = refused = 0
    for mutate, times in MUTATIONS.items():
        for _ in range(times):
            source.write_bytes(mutate(whole, chance))
            if outcome(source, place / "b.safetensors"):
                converted += 1
            else:
                refused += 1
    assert converted + refused == 645
    # A test of which all or nothing is refused would test nothing.
    assert min(converted, refused) > 60


@pytest.mark.slow
def test_mutated_files_of_several(tmp_path: Path) -> None:
    chance = random.Random(1)
    llamas.in_files(tmp_path / "whole")
    place = tmp_path / "place"
    place.mkdir()
    source, counts = place / "a", {True: 0, False: 0}
    for number in range(160):
        shutil.copytree(tmp_path / "whole", source)
        if number % 2:
            index = source / llamas.INDEX
            raw = index.read_bytes()
            index.write_bytes(chance.choice([flipped(raw, chance, 0, len(raw)), raw[:-number]]))
        else:
            shard = chance.choice(sorted(source.glob("*.safetensors")))
            mutate = chance.choice(list(MUTATIONS))
            shard.write_bytes(mutate(shard.read_bytes(), chance))
        counts[outcome(source, place / "b")] += 1
        shutil.rmtree(source)
    assert min(counts.values()) > 5


@pytest.mark.slow
def test_what_we_read_the_library_reads(tmp_path: Path) -> None:
    """Every file that is accepted has the tensors that the library sees."""
    whole = llamas.one_file(tmp_path / "whole.safetensors").read_bytes()
    path, chance, accepted = tmp_path / "a.safetensors", random.Random(2), 0
    for mutate in MUTATIONS:
        for _ in range(40):
            path.write_bytes(mutate(whole, chance))
            try:
                found = read_file(path)
            except HeadwiseError:
                continue
            accepted += 1
            state = load(path.read_bytes())
            llamas.assert_same({n: found.tensor(n) for n in found.headers}, state)
    assert accepted > 60
