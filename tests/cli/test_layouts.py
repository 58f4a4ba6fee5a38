"""``headwise layouts``: the list, one of them drawn, and near names for those that are none."""

import pytest
from typer.testing import CliRunner

from headwise.cli.layouts import layouts
from headwise.errors import OptionError, ShapeError
from headwise.layouts.registry import catalogue_by_family


def run(*arguments: str, columns: int = 80) -> list[str]:
    """The lines of a run that succeeds, in a pipe."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(layouts, arguments)
    assert done.exit_code == 0, done.exception
    assert "\x1b" not in done.stdout
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_every_layout_is_listed_with_its_standing_and_its_tensors() -> None:
    lines = run()
    assert max(map(len, lines)) <= 80
    rows = {words[0]: words for line in lines if (words := line.split())}
    for family in catalogue_by_family().values():
        for one in family:
            assert rows[one.name][1] == ("described" if one.unchecked else "checked")
    assert rows["gpt2"][2:] == ["c_attn,", "c_proj"]
    assert not any("…" in line for line in lines)
    headings = [heading for heading in catalogue_by_family() if len(heading) < 80]
    assert set(headings) <= set(lines)
    assert lines[-1].endswith("headwise layouts show llama")


def test_a_word_of_the_name_lists_fewer() -> None:
    rows = {words[0] for line in run("Falcon") if (words := line.split())}
    assert {"falcon-40b", "falcon-7b", "falcon-rw"} <= rows
    assert "gpt2" not in rows
    assert run("list", "falcon") == run("Falcon")
    text = " ".join(run("list", "falcon"))
    assert "All are checked" in text
    assert "described" not in text
    done = CliRunner().invoke(layouts, ["falcom"])
    assert isinstance(done.exception, OptionError)
    assert "falcon" in done.exception.needed


def test_one_is_drawn_with_its_pattern_function_source_and_note() -> None:
    lines = run("show", "falcon-40b", "--heads", "8", "--kv-heads", "2", "--head-dim", "64")
    assert lines[0] == "falcon-40b"
    assert lines[1] == "checked     yes: a test runs the real implementation"
    assert "source      transformers, models/falcon/modeling_falcon.py" in lines
    assert "drawn with  heads 8, kv_heads 2, head_dim 64, value_dim 64, embed_dim 512" in lines
    assert "query_key_value.weight  (768, 512)" in lines
    at = lines.index("  rows: 64 for each name")
    assert lines[at - 1].strip().startswith("(kv_heads [wq: group head_dim")
    assert lines[at + 1 : at + 3] == [
        "      0  q0  q1  q2  q3  k0  v0",
        "    384  q4  q5  q6  q7  k1  v1",
    ]
    assert "  rotary: half-split" in lines
    assert "  rotated together in q and k: channels 0 and 32, 1 and 33, 2 and 34, ..." in lines


def test_a_layout_that_is_not_checked_says_why() -> None:
    lines = run("show", "vllm", columns=200)
    assert lines[1].startswith("checked     no: its modules")


@pytest.mark.parametrize(
    ("name", "near"), [("lama", "llama"), ("GPT2", "gpt2"), ("mega", "megatron")]
)
def test_a_name_that_is_none_gets_near_ones(name: str, near: str) -> None:
    done = CliRunner().invoke(layouts, ["show", name])
    assert isinstance(done.exception, OptionError)
    assert repr(name) in done.exception.saw
    assert near in done.exception.needed.rpartition("near are ")[2].split(", ")


def test_names_that_contain_the_word_come_first() -> None:
    done = CliRunner().invoke(layouts, ["show", "meta"])
    assert isinstance(done.exception, OptionError)
    assert "near are llama-meta, " in done.exception.needed


def test_a_name_that_is_near_to_none() -> None:
    done = CliRunner().invoke(layouts, ["show", "zzzz"])
    assert isinstance(done.exception, OptionError)
    assert "near" not in done.exception.needed


def test_sizes_that_cannot_be_are_refused() -> None:
    done = CliRunner().invoke(layouts, ["show", "gpt2", "--heads", "8", "--kv-heads", "2"])
    assert isinstance(done.exception, ShapeError)
    assert CliRunner().invoke(layouts, ["show", "gpt2", "--heads", "0"]).exit_code == 2
