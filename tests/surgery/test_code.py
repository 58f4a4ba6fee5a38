"""The form "code": classes of transformers with other numbers of heads in each layer.

Each is compared with the model before, where columns of the output projection are set to zero, and
biases are added, by hand.
"""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typer.testing import CliRunner

from headwise.checkpoints import load_attention
from headwise.cli import app
from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from headwise.surgery import Cut, ModelHeads, check_folder, cut_model, load, write
from headwise.surgery.folders import allow_runs, check_cut, find_loader
from tests.quick import others_extra, others_slow
from tests.root import ROOT
from tests.surgery.families import FAMILIES as SMALL
from tests.surgery.families import (
    HEADS,
    SPECIAL,
    VOCABULARY,
    WIDTH,
    inputs_of,
    output_budget,
    output_of,
)

NAMED = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
SIZES = {**NAMED, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
SIZES |= {"intermediate_size": 64, **SPECIAL}


def made(kind: str, **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(3)
        model = getattr(transformers, kind)
        model = model(model.config_class(**sizes))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        return model.eval()

    return make


WHISPER = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 5}
WHISPER |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 10, **SPECIAL}
# family -> the model, and the end of the names of its output projections
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (SMALL["bert"], "attention.output.dense"),
    "distilbert": (
        made("DistilBertModel", **NAMED, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=64),
        "out_lin",
    ),
    "roberta": (made("RobertaForMaskedLM", **SIZES), "attention.output.dense"),
    "gpt2": (SMALL["gpt2"], "attn.c_proj"),
    "opt": (
        made("OPTForCausalLM", **SIZES, ffn_dim=64, word_embed_proj_dim=WIDTH),
        "out_proj",
    ),
    "gpt_neox": (made("GPTNeoXForCausalLM", **SIZES), "attention.dense"),
    "bart": (SMALL["bart"], "out_proj"),
    "whisper": (
        made("WhisperForConditionalGeneration", vocab_size=VOCABULARY, **WHISPER),
        "out_proj",
    ),
    "gpt_bigcode": (
        made("GPTBigCodeForCausalLM", n_embd=WIDTH, n_layer=2, n_head=HEADS, **NAMED, **SPECIAL),
        "attn.c_proj",
    ),
    "phi3": (made("Phi3ForCausalLM", **SIZES, num_key_value_heads=3), "o_proj"),
    "llama": (SMALL["llama"], "o_proj"),
    "qwen3": (SMALL["qwen3"], "o_proj"),
    "vit": (SMALL["vit"], "o_proj"),
}
GONE = ([2, 3], [0, 1, 4, 5])  # by layer in turns; whole groups of the families with groups
families = pytest.mark.parametrize("family", others_extra(FAMILIES, "bert", quick=["llama"]))
FRESH = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
folder, kind = sys.argv[1:]
options = {"trust_remote_code": True, "output_loading_info": True}
model, info = getattr(transformers, kind).from_pretrained(folder, **options)
assert not any(info.values()), info
with torch.no_grad():
    output = model.eval()(**load_file(folder + "/../inputs.safetensors"))[0]
save_file({"output": output.contiguous()}, folder + "/../output.safetensors")
model.save_pretrained(folder + "/../again")
assert not any(name.startswith("headwise") for name in sys.modules)
"""


def given_to(model: Any) -> dict[str, Tensor]:
    if model.main_input_name != "input_features":
        return inputs_of(model)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (3, 11), generator=generator)
    return {
        "input_features": torch.randn(3, 5, 20, generator=generator),
        "decoder_input_ids": ids,
    }


def cut_of(model: Any, *, mean: bool, first: bool = True) -> Cut:
    """Other heads out of each layer; without ``first`` all those of every second one."""
    whole = ModelHeads(model).whole()
    layers = {name: cut.drop(GONE[n % 2]) for n, (name, cut) in enumerate(whole)}
    if not first:
        layers |= {name: cut.zero(range(HEADS)) for name, cut in [*whole][::2]}
    shift = torch.linspace(-1, 1, WIDTH)
    return Cut({name: cut.shift(shift) if mean else cut for name, cut in layers.items()})


def zeroed(model: Any, end: str, cut: Cut, *, mean: bool = False) -> Any:
    """The model before, with its output projections changed by hand."""
    made = copy.deepcopy(model)
    projections = [
        (name, module)
        for name, module in made.named_modules()
        if name.endswith(end) and not name.endswith("crossattention.output.dense")
    ]
    assert len(projections) == len(ModelHeads(model).specs)
    for path, projection in projections:
        name = max((n for n in cut.layers if path.startswith(n)), key=len, default="")
        with torch.no_grad():
            for head in cut.gone.get(name, ()):
                columns = slice(head * head_dim_of(model), (head + 1) * head_dim_of(model))
                if isinstance(projection, nn.Linear):
                    projection.weight[:, columns] = 0
                else:  # Conv1D, (in, out)
                    projection.weight[columns] = 0
            if mean and projection.bias is None:
                projection.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
            elif mean:
                projection.bias += torch.linspace(-1, 1, WIDTH)
    return made


def head_dim_of(model: Any) -> int:
    return int(getattr(model.config, "head_dim", None) or WIDTH // HEADS)


def assert_same(output: Tensor, expected: Any, given: dict[str, Tensor]) -> None:
    output_budget(expected, given).assert_holds(output)


def written(
    family: str, folder: Path, *, mean: bool = True, first: bool = True
) -> tuple[Any, Cut, Any, Path]:
    """The model, its cut, the model with zeros by hand, and the folder of the form "code"."""
    make, end = FAMILIES[family]
    model = make()
    model.save_pretrained(folder / "source")
    cut = cut_of(model, mean=mean, first=first)
    assert write(cut, folder / "source", folder / "cut").form == "code"
    return model, cut, zeroed(model, end, cut, mean=mean), folder / "cut"


@families
def test_transformers_alone_gives_the_outputs_of_the_model_with_zeros(
    family: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model, _, expected, folder = written(family, tmp_path)
    given = given_to(model)
    save_file(given, tmp_path / "inputs.safetensors")
    auto_map = json.loads((folder / "config.json").read_text("utf-8"))["auto_map"]
    kind = next(n for n, code in auto_map.items() if code.endswith(f".{type(model).__name__}"))
    command = [sys.executable, "-c", FRESH, str(folder), kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    output = load_file(tmp_path / "output.safetensors")["output"]
    assert_same(output, expected, given)
    assert not torch.equal(output, output_of(model, given))
    # saved again, the code goes along
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(output_of(again.eval(), given), output)
    # headwise reads it by its config, and runs no code of the folder
    (folder / "modeling_cut.py").write_text("raise SystemExit('the code of the folder has run')")
    own = load(folder)
    assert torch.equal(output_of(own, given), output)
    is_read = not model.config.is_encoder_decoder and family != "phi3"  # no bias in its layout
    for layer in range(2) if is_read else ():
        counted = load_attention(folder, layer=layer)
        assert counted.num_heads == HEADS - len(GONE[layer % 2])


@pytest.mark.parametrize("family", others_slow(("bert", "gpt2", "bart", "vit"), "bert"))
def test_every_auto_class_of_the_original_loads(family: str, tmp_path: Path) -> None:
    _, _, _, folder = written(family, tmp_path)
    auto_map = json.loads((folder / "config.json").read_text("utf-8"))["auto_map"]
    assert len(auto_map) > 3
    left = [HEADS - len(gone) for gone in GONE]
    for auto, code in auto_map.items():
        if auto == "AutoConfig":
            continue
        loaded = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
        assert type(loaded).__name__ == code.rpartition(".")[2]
        counts = [int(spec.num_heads) for spec in ModelHeads(loaded).specs.values()]
        assert {*counts} == {*left}
        assert all(torch.isfinite(x).all() for x in loaded.state_dict().values())


@families
@pytest.mark.parametrize("mean", [True, False])
def test_a_layer_whose_heads_are_all_zero_has_no_attention(
    family: str, mean: bool, tmp_path: Path
) -> None:
    model, _, expected, folder = written(family, tmp_path, mean=mean, first=False)
    given, smaller = given_to(model), load(folder)
    kind = find_loader(folder, smaller)
    loaded = getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True).eval()
    assert_same(output_of(loaded, given), expected, given)
    assert torch.equal(output_of(copy.deepcopy(smaller), given), output_of(loaded, given))
    if family == "phi3" and mean:  # its layout has no bias of the output: none is cut again
        return
    layers = ModelHeads(smaller).whole()
    assert len([*layers]) == len([*ModelHeads(model).whole()]) // 2
    loaded.save_pretrained(tmp_path / "again")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(output_of(again.eval(), given), output_of(loaded, given))
    second = Cut({name: cut.drop([0]) for name, cut in layers})
    assert write(second, folder, tmp_path / "twice").form == "code"
    if not model.config.is_encoder_decoder:
        with pytest.raises(HeadwiseError, match="layer 0 of"):
            load_attention(folder, layer=0)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("family", others_slow(("gpt2", "opt", "gpt_neox", "llama"), "gpt2"))
def test_text_is_generated_with_a_cache_and_padding_on_the_left(
    family: str, first: bool, tmp_path: Path
) -> None:
    model, _, expected, folder = written(family, tmp_path, first=first)
    cut = load(folder)
    ids = inputs_of(model)["input_ids"]
    lengths = (7, 11, 17)
    rows = [ids[row, :length].flip(0) for row, length in enumerate(lengths)]
    padded = pad_sequence(rows, batch_first=True).flip(1)
    mask = pad_sequence([torch.ones(n) for n in lengths], batch_first=True).flip(1).long()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    texts = [each.generate(padded, **options, pad_token_id=0) for each in (cut, expected)]
    assert torch.equal(*texts)


def test_it_trains_and_exports(tmp_path: Path) -> None:
    model, _, _, folder = written("bert", tmp_path)
    given = given_to(model)
    kind = transformers.AutoModelForSequenceClassification
    tuned = kind.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    labels = torch.tensor([0, 2, 1])
    optimizer = torch.optim.Adam(tuned.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = tuned(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    tuned.eval().save_pretrained(tmp_path / "tuned")
    again = kind.from_pretrained(tmp_path / "tuned", trust_remote_code=True).eval()
    expected = tuned(**given).logits
    assert torch.equal(again(**given).logits, expected)
    exported = torch.export.export(again, (), kwargs=given).module()
    assert torch.equal(exported(**given).logits, expected)


def test_without_the_flag_transformers_ends_in_a_sentence(tmp_path: Path) -> None:
    _, _, _, folder = written("bert", tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
    assert not any(tmp_path.glob("**/__pycache__"))


def test_a_cut_folder_is_cut_again(tmp_path: Path) -> None:
    model, first, _, folder = written("bert", tmp_path)
    smaller = load(folder)
    second = Cut({name: cut.drop([0]) for name, cut in ModelHeads(smaller).whole()})
    assert write(second, folder, tmp_path / "again").form == "code"
    given, end = given_to(model), FAMILIES["bert"][1]
    both = first.then(second)
    assert Cut.load(tmp_path / "again" / "cut.json").gone == both.gone
    expected = zeroed(model, end, both, mean=True)
    check_folder(tmp_path / "again", expected, given)


def test_a_model_with_code_of_its_own_keeps_to_the_other_forms(tmp_path: Path) -> None:
    model = FAMILIES["bert"][0]()
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.BertModel"}}))
    (tmp_path / "source" / "modeling.py").write_text("from transformers import BertModel\n")
    cut = cut_of(model, mean=False)
    options: dict[str, Any] = {"trust_remote_code": True}
    with pytest.raises(OptionError, match="the class of the model is code in its folder"):
        write(cut, tmp_path / "source", tmp_path / "cut", **options)
    assert not (tmp_path / "cut").exists()
    write(cut, tmp_path / "source", tmp_path / "cut", form="headwise", **options)


def test_a_class_that_counts_heads_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Phi-3 would be, which reads the number of heads in the config of all layers."""
    monkeypatch.setattr("headwise.surgery.models._resize_reading", lambda *_: None)
    model = made("Phi3ForCausalLM", **SIZES)()
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(OptionError, match="Phi3ForCausalLM, which does not run at these sizes"):
        write(cut_of(model, mean=False), tmp_path / "source", tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


@pytest.mark.extra
def test_towers_of_two_widths_are_cut_and_checked(tmp_path: Path) -> None:
    picture = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    picture |= {"intermediate_size": 64, "image_size": 16, "patch_size": 8}
    towers = {"text_config": SIZES, "vision_config": picture}
    model = made("CLIPModel", **towers, projection_dim=16)()
    model.save_pretrained(tmp_path / "source")
    cut = Cut({n: each.drop(range(1 + n.count("1"))) for n, each in ModelHeads(model).whole()})
    assert {each.num_heads for _, each in cut} == {4, HEADS}
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    given = {**inputs_of(model), "pixel_values": images}
    assert write(cut, tmp_path / "source", tmp_path / "cut", inputs=given).form == "code"
    # the check fails for another cut than the one that was written
    other = Cut({name: each.drop([0]) for name, each in ModelHeads(model).whole()})
    with pytest.raises(CheckpointError, match="gives other outputs"):
        check_cut(tmp_path / "cut", other, model, given)


@pytest.mark.parametrize("family", others_slow(("bert", "llama"), "bert"))
def test_rounding_explains_less_than_a_small_fault(family: str) -> None:
    """Of one head's output in one layer, which is a hundredth larger."""
    make, end = FAMILIES[family]
    model = make()
    given = given_to(model)
    output, allowed = allow_runs(model, given)
    apart = (output - output_budget(model, given).exact).abs().max()
    assert 0 < float(apart) <= allowed
    faulty = copy.deepcopy(model)
    weights = [x for name, x in faulty.named_parameters() if name.endswith(f"{end}.weight")]
    with torch.no_grad():
        weights[0][:, :8] *= 1.01
    moved = (output_of(faulty, given) - output).abs().max()
    assert float(moved) > allowed, f"{float(moved)} of {allowed}"


def test_the_file_is_short_and_the_same_for_all(tmp_path: Path) -> None:
    texts = {
        (written(family, tmp_path / family)[3] / "modeling_cut.py").read_text("utf-8")
        for family in ("bert", "gpt2")
    }
    assert len(texts) == 1
    lines = texts.pop().splitlines()
    assert len(lines) <= 60


@pytest.mark.parametrize("family", others_slow(("bert", "gpt2"), "gpt2"))
def test_a_folder_with_pruned_heads_is_written_so_that_it_loads(
    family: str, tmp_path: Path
) -> None:
    make, end = FAMILIES[family]
    model, pruned = make(), {"1": [0, 4]}
    name = [*ModelHeads(model).whole().layers][1]
    cut = Cut({name: ModelHeads(model).whole().layers[name].drop(pruned["1"])})
    source = tmp_path / "source"
    model.save_pretrained(source)
    cut_model(cut, model).save_pretrained(source)  # the weights as transformers 4 wrote them
    config = json.loads((source / "config.json").read_text("utf-8"))
    (source / "config.json").write_text(json.dumps(config | {"pruned_heads": pruned}))
    command = ["prune", str(source), "--keep", "1.0", "--out", str(tmp_path / "whole")]
    done = CliRunner().invoke(app, command)
    assert not done.exit_code, done.output
    given = given_to(model)
    assert_same(output_of(load(tmp_path / "whole"), given), zeroed(model, end, cut), given)
    assert "pruned_heads" not in (tmp_path / "whole" / "config.json").read_text("utf-8")


@pytest.mark.slow
def test_the_command_of_the_first_pages_ends_in_a_folder_that_loads(tmp_path: Path) -> None:
    pages = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/doors.md")]
    lines = (line for page in pages for line in page.splitlines())
    [line] = {line for line in lines if line.startswith('headwise prune "$(')}
    sentences = [sentence for half in read_sentences() for sentence in half[:4]]
    (tmp_path / "lines.txt").write_text("\n".join(sentences))
    tools = str(Path(sys.executable).parent)
    done = subprocess.run(
        f"{line} --data lines.txt",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    [printed] = re.findall(r"(?m)^form code: (from transformers .*)$", done.stdout)
    pasted: dict[str, Any] = {}
    exec(printed, pasted)
    counts = [layer.attention.self.num_attention_heads for layer in pasted["model"].encoder.layer]
    assert sum(counts) == 54
    assert pasted["tokenizer"]("a cat").keys() >= {"input_ids", "attention_mask"}


# What `headwise prune` takes out of all-MiniLM-L6-v2 by default: 18 of 72 heads, by layer.
ENCODER = ((1, 6, 7, 8, 11), (1, 2, 5, 6, 9, 10, 11), (2, 7, 9, 11), (5,), (9,))


@pytest.mark.extra
def test_a_trained_encoder_is_tuned_and_saved_again(tmp_path: Path) -> None:
    folder = model_folder()
    original = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    layers = ModelHeads(original).whole().layers
    names = [f"encoder.layer.{number}.attention." for number in range(len(ENCODER))]
    cut = {name: layers[name].drop(gone) for name, gone in zip(names, ENCODER, strict=True)}
    assert write(Cut(cut), folder, tmp_path / "cut").form == "code"
    tuned = transformers.AutoModel.from_pretrained(tmp_path / "cut", trust_remote_code=True)
    sentences, others = read_sentences()
    optimizer = torch.optim.AdamW(tuned.parameters(), 5e-5)

    def loss(sentences: Sequence[str]) -> Tensor:
        given = tokenizer(list(sentences), padding=True, return_tensors="pt")
        real = given["attention_mask"][..., None]
        made = (tuned(**given).last_hidden_state * real).sum(1)
        with torch.no_grad():
            expected = (original(**given).last_hidden_state * real).sum(1)
        return 1 - torch.cosine_similarity(made, expected).mean()

    with torch.no_grad():
        before = float(loss(others))
    for step in range(50):
        loss(sentences[step * 8 % 200 :][:8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.eval().save_pretrained(tmp_path / "tuned")
    again = transformers.AutoModel.from_pretrained(tmp_path / "tuned", trust_remote_code=True)
    given = tokenizer(list(others[:8]), padding=True, return_tensors="pt")
    with torch.no_grad():
        assert float(loss(others)) < 0.7 * before
        assert torch.equal(again.eval()(**given)[0], tuned(**given)[0])
