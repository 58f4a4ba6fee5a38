"""``headwise scan``: what it prints and writes, and what it refuses before it works."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from headwise.cli import output
from headwise.cli.output import option_text
from headwise.errors import HeadwiseError
from headwise.models import minilm
from headwise.reports.report import RULE, clearest_statistic, standout_heads
from headwise.scanning import plan as estimate
from headwise.scanning.result import HeadScan
from tests.cli.scan_command import refused, run
from tests.huggingface.stored import TEXT, bert, gpt2, stored
from tests.quick import others_slow
from tests.reports.html import Tree
from tests.test_door import HEAVY, loaded_by

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

# ---- what it prints and writes -----------------------------------------------------------------


def test_what_was_read_the_pictures_the_words_and_the_page(model: Path, text: Path) -> None:
    out, err = run(model, "--text", text)
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith("small-bert: BertModel, ")
    assert "parameters in float32; 2 layers of 6 heads." in " ".join(lines[:2])
    assert "Input: cats.txt, all 24 tokens. Separators: [SEP], “.”." in " ".join(lines)
    page = Path(lines[-1])
    assert max(len(line) for line in lines if line != str(page)) <= 80
    assert page == Path.cwd() / "headwise-scan" / "index.html"
    assert (
        "What 12 attention heads of small-bert attend to" in Tree(page.read_text("utf-8")).root.text
    )
    assert re.search(r"cats.txt, all 24 tokens: about \d+ s, [\d.]+ [GM]B, by estimate\.", err)


def test_the_pictures_and_the_words_are_the_scans(model: Path, text: Path) -> None:
    out, _ = run(model, "--text", text, "--out", "kept")
    found = HeadScan.load("kept/scan.safetensors")
    page = Path("headwise-scan/index.html").read_text("utf-8")
    assert '"files":["kept/scan.safetensors"]' in page  # which its lines of Python load
    lines = out.splitlines()
    drawn = clearest_statistic(found)
    assert drawn is not None
    place = next(n for n, line in enumerate(lines) if line.startswith(drawn.label))
    for layer, row in enumerate(drawn.rows):
        cells = lines[place + 2 + layer].split()[:7]
        assert cells == [str(layer), *(drawn.scale.format_short(value) for value in row)]
    told = [line.split()[:2] for line in lines if re.match(r" +\d +\d +[a-z]", line)]
    assert told == [
        [str(one.head.layer_index), str(one.head.head)] for one in standout_heads(found)
    ]
    table = next(n for n, line in enumerate(lines) if "stand out" in line)
    [path] = (n for n, line in enumerate(lines) if ".html" in line)
    assert table < place < path  # the page is named once, at the end


@pytest.mark.parametrize("out", [(), ("--out", "kept")])
def test_one_text_has_a_map_of_single_tokens_wherever_it_is_kept(
    out: tuple[str, ...],
) -> None:
    """128 blocks are for a corpus, whose documents have a file each."""
    run("--demo", "--length", 151, "--stats", "map", *out)
    page = Path("headwise-scan/index.html").read_text("utf-8")
    tokens = int(re.findall(r'"lengths":\[(\d+)\]', page)[0])
    assert 128 < tokens <= 151
    assert f'"map":[{tokens},{tokens}]' in page


def test_the_heads_that_stand_out_are_a_table() -> None:
    out, _ = run("--demo", "--length", 65, "--stats", "previous_token", "--out", "kept")
    top = HeadScan.load("kept/scan.safetensors").top("previous_token", 1)[0]
    row = next(
        line for line in out.splitlines() if "on the token before" in line and "puts" in line
    )
    assert row.split()[:2] == [str(top.layer_index), str(top.head)]
    assert f"puts {100 * top.value:.0f} % of its weight on the token before" in row
    lines = out.splitlines()
    assert lines[-1] == str(Path.cwd() / "kept")
    files = re.fullmatch(r"The scan is saved as (.*), (.*) and (.*), with a file .*:", lines[-2])
    assert files is not None
    names = {path.name for path in Path("kept").iterdir()}
    assert names == {*files.groups(), "corpus.json"}


def test_where_no_head_stands_out_the_terminal_says_so(tmp_path: Path) -> None:
    alike = gpt2()
    with torch.no_grad():
        for name, weights in alike.named_parameters():
            if "c_attn" in name:
                weights.zero_()  # every head looks at all it may see, evenly
    out, _ = run(stored(tmp_path / "alike", alike, with_tokenizer=False), "--random-repeats")
    assert f"No head stands out. {RULE}" in " ".join(out.split())


def test_what_cannot_be_printed_does_not_reach_the_terminal(model: Path) -> None:
    Path("a\x1b[31m.txt").write_text(TEXT, "utf-8")
    out, err = run(model, "--text", "a\x1b[31m.txt", "--stats", "entropy")
    page = Path("headwise-scan/index.html").read_text("utf-8")
    assert "\x1b" not in out + err + page
    assert "a\\x1b[31m.txt, all 24 tokens" in page
    assert "a\\x1b[31m.txt, all 24 tokens" in " ".join(out.split())


def test_what_is_kept(model: Path, text: Path) -> None:
    run(model, "--text", text, "--out", "kept", "--stats", "entropy,distance", "--layers", "1")
    found = HeadScan.load("kept/scan.safetensors")
    assert found.layers == ("encoder.layer.1.attention.self",)
    assert found.names == ("entropy", "distance")
    with Path("kept/table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["entropy"]) for row in rows] == found["entropy"].flatten().tolist()
    assert list(rows[0]) == ["layer", "layer_index", "head", "entropy", "distance"]


def test_json_is_all_of_standard_output(model: Path, text: Path) -> None:
    out, err = run(model, "--text", text, "--json", "--page", "p.html")
    record = json.loads(out)
    assert record["model"]["class"] == "BertModel"
    assert len(record["heads"]) == 12
    assert err.rstrip().endswith(str(Path.cwd() / "p.html"))


@pytest.mark.slow
def test_tokens_of_a_file(model: Path) -> None:
    Path("ids.txt").write_text("[2, 5, 6,\n7 8 3]", "utf-8")
    out, _ = run(model, "--tokens", "ids.txt", "--json")
    assert json.loads(out)["read"] == {"what": "ids.txt, all 6 tokens", "sequences": 1, "tokens": 6}
    out, _ = run(model, "--tokens", "ids.txt", "--length", 4, "--json", "--force")
    assert json.loads(out)["read"]["what"] == "ids.txt, the first 4 of 6 tokens"


@pytest.mark.slow
def test_random_tokens_and_the_same_again(tmp_path: Path) -> None:
    folder = stored(tmp_path / "gpt2", gpt2(), with_tokenizer=False)
    out, _ = run(folder, "--random-repeats", "--json")
    read = json.loads(out)["read"]
    # The begin token, and twice as many as the model's 32 positions leave room for.
    assert read["what"] == "15 random tokens and the same 15 again"
    assert read["tokens"] == 31
    out, _ = run(folder, "--random-repeats", "--length", 12, "--json", "--force")
    assert json.loads(out)["read"]["tokens"] == 11


def test_a_text_is_cut_to_what_the_model_takes(model: Path) -> None:
    Path("long.txt").write_text(9 * TEXT, "utf-8")
    out, _ = run(model, "--text", "long.txt", "--json")
    assert json.loads(out)["read"]["what"] == "long.txt, the first 40 of 200 tokens"


def test_without_anything_to_read_the_text_that_ships_is_read(model: Path) -> None:
    out, _ = run(model, "--json")
    assert "Alice’s Adventures in Wonderland, the first 40 of" in json.loads(out)["read"]["what"]


def test_the_model_that_ships(tmp_path: Path) -> None:
    out, _ = run("--demo", "--length", 65, "--stats", "previous_token,induction,map")
    assert "tiny: Tiny, 2.7 million parameters" in out
    assert "Alice’s Adventures in Wonderland, the first 65 of" in " ".join(out.split())
    assert r"Separators: “.”, “\n”." in " ".join(out.split())


@pytest.mark.slow
def test_real_minilm() -> None:
    try:
        folder = minilm.model_folder()
    except HeadwiseError as missing:
        pytest.skip(str(missing))
    out, _ = run(folder, "--length", 64, "--stats", "previous_token,map")
    assert "6 layers of 12 heads" in " ".join(out.split())
    assert "on the token before" in out


def test_an_earlier_page_is_kept(model: Path, text: Path) -> None:
    options = (model, "--text", text, "--length", 8, "--stats", "entropy", "--page", "p.html")
    run(*options)
    Path("p.html").write_text("an earlier page", "utf-8")
    error = refused(*options)
    assert error.saw == "--page p.html, which is there already"
    assert "--force" in error.do
    assert Path("p.html").read_text("utf-8") == "an earlier page"
    run(*options, "--force")
    page = Path("p.html").read_text("utf-8")
    again = re.search(r"headwise scan \S+ --text \S+ --length 8 --page p.html --force", page)
    assert again is not None  # the command that the page gives writes the page again


@pytest.mark.parametrize(
    ("dtype", "words"), [("float64", "float64"), ("bfloat16", "bfloat16"), (None, "float32")]
)
@pytest.mark.parametrize("is_demo", others_slow([False, True]))
def test_the_dtype_of_the_model(model: Path, dtype: str | None, words: str, is_demo: bool) -> None:
    options = [] if dtype is None else ["--dtype", dtype]
    options += ["--length", "16", "--stats", "entropy", "--json", "--device", "cpu"]
    found = json.loads(run("--demo" if is_demo else model, *options)[0])
    assert found["model"]["about"].endswith(f" parameters in {words}")
    assert all(0 < head["entropy"] < math.log(16) for head in found["heads"])


@pytest.mark.parametrize("device", ["cuda:77", "abacus", "meta"])
def test_a_device_that_is_not_there(model: Path, device: str) -> None:
    assert f"--device {device}: " in refused(model, "--device", device).saw


def test_a_dtype_that_no_model_has(model: Path) -> None:
    assert refused(model, "--dtype", "int8").saw == "--dtype int8"


def test_progress_without_a_terminal_is_plain_lines(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (model, "--text", text, "--stats", "entropy", "--json", "--force")
    assert len(run(*options)[1].splitlines()) == 3  # the estimate, and the page
    monkeypatch.setattr(output, "SECONDS", 0)
    out, err = run(*options)
    lines = err.splitlines()
    assert [line for line in lines if re.fullmatch(r"[\w.]+: \d of 2", line)] == lines[1:-2]
    assert len(lines) > 3
    assert lines[-3].endswith(": 2 of 2")
    json.loads(out)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "saw"),
    [
        ([], "no MODEL_DIR"),
        (["--demo", "folder"], "folder and --demo"),
        (["nowhere"], "nowhere does not exist"),
        (["."], "holds no config.json"),
        (["--demo", "--text", "a", "--random-repeats"], "--text and --random-repeats"),
        (["--demo", "--tokens", "a", "--random-repeats"], "--tokens and --random-repeats"),
        (["--demo", "--stats", "entropie"], "'entropie'"),
        (["--demo", "--length", "1"], "--length 1"),
        (["--demo", "--random-repeats", "--length", "4"], "--random-repeats with --length 4"),
        (["--demo", "--layers", "7"], "*.7.*"),
        (["--demo", "--text", "nothing.txt"], "nothing.txt, no file"),
        (["--demo", "--stats", "sink"], "statistic sink, which no layer has"),
    ],
)
def test_refusals(arguments: list[str], saw: str) -> None:
    error = refused(*arguments)
    assert saw in error.saw
    assert len(str(error).splitlines()) == 3


def test_a_misspelt_option_is_answered_in_options() -> None:
    saw, _, do = refused("--demo", "--stats", "entropy,previous_tokn").lines(option_text)
    assert (saw, do) == ("--stats 'previous_tokn'", "--stats previous_token")
    assert refused("--demo", "--stats", "zzz").do == "choose from these"
    assert "=" not in refused("--demo", "--layers", "7").do  # no Python


@pytest.mark.parametrize(
    ("content", "saw"),
    [("", "which is empty"), ("  \n", "which is empty"), ("cat", "a text of one token")],
)
def test_a_text_with_nothing_to_look_at(model: Path, content: str, saw: str) -> None:
    Path("short.txt").write_text(content, "utf-8")
    assert saw in refused(model, "--text", "short.txt").saw


def test_a_text_that_is_no_text(model: Path) -> None:
    Path("image.txt").write_bytes(b"ab\xff\xfe")
    assert "byte 2 is not UTF-8" in refused(model, "--text", "image.txt").saw
    Path("empty").mkdir()
    assert "a folder without .txt files" in refused(model, "--text", "empty", "--out", "o").saw


@pytest.mark.parametrize(
    ("content", "saw"),
    [
        ("2 5 60", "tokens from 2 to 60"),
        ("2 -5", "tokens from -5 to 2"),
        ("2 cat", "'cat'"),
        ("2", "with 1 token"),
        ("", "with 0 tokens"),
    ],
)
def test_tokens_that_are_none_of_the_models(model: Path, content: str, saw: str) -> None:
    Path("ids.txt").write_text(content, "utf-8")
    said = refused(model, "--tokens", "ids.txt").saw
    assert saw in said
    assert not said.endswith("1 tokens")


def test_more_than_the_model_has_positions_for(model: Path, text: Path) -> None:
    error = refused(model, "--text", text, "--length", 41)
    assert (error.saw, error.do) == ("--length 41", "--length 40")
    assert "at most 40" in error.needed


def test_text_without_a_tokenizer(tmp_path: Path, text: Path) -> None:
    folder = stored(tmp_path / "bare", gpt2(), with_tokenizer=False)
    assert "holds no tokenizer" in refused(folder, "--text", text).saw


def test_a_statistic_that_the_model_cannot_have(tmp_path: Path) -> None:
    folder = stored(tmp_path / "bare", gpt2(), with_tokenizer=False)
    error = refused(folder, "--random-repeats", "--stats", "separator")
    assert "no token was named as a separator" in error.saw


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    broken = bert()
    with torch.no_grad():
        broken.encoder.layer[1].output.dense.weight[3, 4] = torch.nan
    error = refused(stored(tmp_path / "broken", broken))
    assert "encoder.layer.1.output.dense.weight holds 1 of 3,072" in error.saw


def test_a_model_without_attention(tmp_path: Path) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64}
    fourier = transformers.FNetModel(transformers.FNetConfig(**sizes, max_position_embeddings=40))
    error = refused(stored(tmp_path / "fourier", fourier))
    assert "no attention was captured" in error.saw


def test_a_model_that_needs_more_than_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
    config = transformers.CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": 60,
            "intermediate_size": 64,
            "max_position_embeddings": 9,
        },
        vision_config={**sizes, "intermediate_size": 64, "image_size": 8, "patch_size": 4},
    )
    folder = stored(tmp_path / "clip", transformers.CLIPModel(config), with_tokenizer=False)
    error = refused(folder, "--random-repeats", "--length", 9)
    assert re.match(r"clip, which fails on 8 tokens: \w+Error: ", error.saw)
    assert error.needed == "a model that takes token ids alone"


def test_memory_that_will_not_do(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (model / "model.safetensors").stat().st_size
    monkeypatch.setattr(estimate, "available_memory", lambda: weights - 1)
    assert "the weights in" in refused(model, "--text", text).saw
    monkeypatch.setattr(estimate, "available_memory", lambda: 3_000_000)
    error = refused(model, "--text", text)
    assert re.search(r"24 tokens of small-bert: about \d+ MB more memory", error.saw)
    assert "at most 3.0 MB" in error.needed
    run(model, "--text", text, "--skip-memory-check")


def test_a_page_or_a_folder_that_cannot_be_written(model: Path, text: Path) -> None:
    assert "which is a folder" in refused(model, "--page", ".").saw
    assert "which is a file" in refused(model, "--out", text).saw
    before = sorted(model.iterdir())
    assert "the folder of the model" in refused(model, "--out", f"{model}/.").saw
    assert sorted(model.iterdir()) == before


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by("from headwise.cli import main; main()", "scan", "--help")
    assert "headwise.cli.scan" in loaded
    assert not HEAVY & loaded


def test_the_command_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwise", "scan", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines[0] == "headwise: nowhere does not exist"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["needed", "do"]
    assert not (tmp_path / "headwise-scan" / "index.html").exists()
