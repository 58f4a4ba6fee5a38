"""Memory of this machine: what psutil says, and limits of groups in files that were made up."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headwise.support.memory import available_memory, process_memory

GROUP = "proc/self/cgroup"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    return root


LEFT = 700_000  # bytes, of the machine


@pytest.fixture(autouse=True)
def _a_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name != "test_this_machine":
        memory = SimpleNamespace(available=LEFT)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_what_the_machine_has_left(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == LEFT


def test_a_group_with_more_than_the_machine(tmp_path: Path) -> None:
    group = {
        GROUP: "0::/\n",
        "sys/fs/cgroup/memory.max": "9000000\n",
        "sys/fs/cgroup/memory.current": "1\n",
    }
    assert available_memory(machine(tmp_path, group)) == LEFT


def test_a_group_may_have_less(tmp_path: Path) -> None:
    group = {
        GROUP: "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "500000\n",
        "sys/fs/cgroup/outer/memory.current": "200000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 50000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "190000\n",
    }
    assert available_memory(machine(tmp_path, group)) == 350_000


def test_a_group_of_the_first_version_is_not_read(tmp_path: Path) -> None:
    group = {
        GROUP: "5:cpu,memory:/mine\n3:pids:/mine\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    }
    assert available_memory(machine(tmp_path, group)) > 400_000


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    group = {
        GROUP: "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "101\n",
    }
    assert available_memory(machine(tmp_path, group)) == 0


def test_this_machine() -> None:
    assert available_memory() > 0
    assert process_memory() > 50e6  # torch alone is more
