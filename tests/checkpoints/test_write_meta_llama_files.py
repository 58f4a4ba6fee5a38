"""consolidated.00.pth and params.json, as the code that Meta published reads them."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from headwise import detect
from headwise.checkpoints import conversion, foreign, load_attention
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.cli.convert import convert
from headwise.errors import HeadwiseError
from tests.checkpoints import llamas
from tests.cli.alone import Alone

COMMAND = Alone(convert)
SCALED = {  # of five pairs one is divided, and one blended
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
SIZES = {
    "vocab_size": 31,
    "hidden_size": 60,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "eos_token_id": 1,
    "max_position_embeddings": 8200,
}


def model(folder: Path, **changes: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "rope_parameters": PLAIN, **changes})
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    made.save_pretrained(folder)
    return made.double().eval()


# ---- the forward pass that Meta published, with its rotation by complex numbers ------------------


def frequencies(head_dim: int, args: dict[str, Any]) -> Tensor:
    found = args["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    if not args.get("use_scaled_rope"):
        return found
    scaled = []
    for frequency in found:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled.append(frequency)
        elif wavelength > 8192 / 1:
            scaled.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * frequency / 8 + smooth * frequency)
    return torch.stack(scaled)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def width_of_the_mlp(args: dict[str, Any]) -> int:
    hidden = int(2 * (4 * args["dim"]) / 3)
    if args.get("ffn_dim_multiplier") is not None:
        hidden = int(args["ffn_dim_multiplier"] * hidden)
    return args["multiple_of"] * ((hidden + args["multiple_of"] - 1) // args["multiple_of"])


def logits(folder: Path, tokens: Tensor) -> Tensor:
    """What Meta's Transformer gives for the two files of a folder."""
    args = json.loads((folder / "params.json").read_text())
    state = torch.load(folder / "consolidated.00.pth", map_location="cpu", weights_only=True)
    state = {name: x.double() for name, x in state.items()}
    heads, groups = args["n_heads"], args["n_heads"] // args["n_kv_heads"]
    head_dim, eps, length = args["dim"] // heads, args["norm_eps"], tokens.shape[1]
    angles = torch.outer(torch.arange(length).double(), frequencies(head_dim, args))[:, None]
    mask = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
    h = state["tok_embeddings.weight"][tokens]
    assert h.shape[-1] == args["dim"]
    assert len(state["tok_embeddings.weight"]) == args["vocab_size"]
    for layer in range(args["n_layers"]):
        own = {n.split(".", 2)[2]: x for n, x in state.items() if n.startswith(f"layers.{layer}.")}
        x = rms_norm(h, own["attention_norm.weight"], eps)
        q, k, v = (
            (x @ own[f"attention.w{n}.weight"].mT).unflatten(-1, (-1, head_dim)) for n in "qkv"
        )
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (y.repeat_interleave(groups, dim=2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim) + mask
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        h = h + out @ own["attention.wo.weight"].mT
        x = rms_norm(h, own["ffn_norm.weight"], eps)
        w1, w2, w3 = (own[f"feed_forward.w{n}.weight"] for n in (1, 2, 3))
        assert len(w1) == width_of_the_mlp(args)
        h = h + (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT
    return rms_norm(h, state["norm.weight"], eps) @ state["output.weight"].mT


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_parameters": SCALED}, {"tie_word_embeddings": True}, {"intermediate_size": 77}],
    ids=["plain", "scaled", "tied", "another MLP"],
)
def test_meta_gives_what_transformers_gives(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = model(tmp_path / "a", **changes)
    COMMAND.run(tmp_path / "a", tmp_path / "b", "--to", "llama-meta", "--as", "meta")
    assert sorted(os.listdir(tmp_path / "b")) == ["consolidated.00.pth", "params.json"]
    tokens = torch.randint(31, (1, 400), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours(tokens).logits
    # transformers rounds angles, of up to 400 radians here, to float32 in each of two layers
    bound = 2 * tokens.shape[1] * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert bound < float(expected.abs().mean()) / 50, "a bound that could not fail"
    torch.testing.assert_close(logits(tmp_path / "b", tokens), expected, rtol=0, atol=bound)


def test_the_two_files_are_read_back(tmp_path: Path) -> None:
    model(tmp_path / "a", rope_parameters=SCALED)
    out, _ = COMMAND.run(tmp_path / "a", tmp_path / "b", "--to", "llama-meta", "--as", "meta")
    assert out.splitlines()[-1] == str(tmp_path / "b")
    found = detect(tmp_path / "b")
    assert found.layout is not None
    assert found.layout.name == "llama-meta"
    before, after = (load_attention(tmp_path / name, layer=1) for name in "ab")
    assert before.rotary is not None
    assert after.rotary is not None
    assert after.rotary.scaling == before.rotary.scaling is not None
    x = torch.randn(2, 40, 60)
    torch.testing.assert_close(before(x), after(x))
    COMMAND.run(tmp_path / "b", tmp_path / "c", "--to", "llama")
    llamas.assert_same(llamas.read(tmp_path / "c"), llamas.read(tmp_path / "a"))


def test_a_file_becomes_a_folder_and_is_begun_anew_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "a")
    source = tmp_path / "a" / "model.safetensors"
    command = (source, tmp_path / "b", "--to", "llama-meta", "--as", "meta")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(foreign.torch_file, "save_torch_file", stop)
        assert COMMAND.invoke(*command).exit_code
    assert not (tmp_path / "b").exists()
    with monkeypatch.context() as patch:  # all tensors are safe on the disk
        patch.setattr(conversion, "_write_steps", stop)
        out, _ = COMMAND.run(*command)
    assert out.startswith("Resumed an interrupted run: the files it had finished were kept.")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert len(open_source(tmp_path / "b")) == len(open_source(source))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another scaling": ({"rope_parameters": {**SCALED, "factor": 32.0}}, "'factor': 32.0"),
    "wide heads": ({"head_dim": 12}, "6 heads of 12 in an embed_dim of 60"),
    "another function": ({"hidden_act": "gelu"}, "an MLP with gelu"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_meta_cannot_load_is_refused_first(
    row: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    model(tmp_path / "a", **row[0])
    refused = COMMAND.refused(tmp_path / "a", tmp_path / "b", "--to", "llama-meta", "--as", "meta")
    assert row[1] in refused.saw
    assert os.listdir(tmp_path) == ["a"]


def test_weights_that_are_no_whole_model_are_refused(tmp_path: Path) -> None:
    model(tmp_path / "a")
    command = (tmp_path / "a", tmp_path / "b", "--as", "meta", "--to")

    def saw(*more: object) -> str:
        error = COMMAND.refused(*command, *more)
        assert isinstance(error, HeadwiseError)
        return error.saw

    assert "weights in the layout vllm" in saw("vllm")
    assert "weights without tok_embeddings.weight, " in saw("llama-meta", "--root", "text.")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config |= {"sliding_window": 4, "model_type": "mistral"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert "a window of 4 keys in layer 0" in saw("llama-meta")
    (tmp_path / "a" / "config.json").unlink()
    counts = ("--from", "llama", "--heads", 6, "--kv-heads", 2)
    assert "weights without a config.json" in saw("llama-meta", *counts)


@pytest.mark.parametrize("inner", [11008, 13824, 28672, 14336, 8192, 172, 160, 161, 77, 3])
@pytest.mark.parametrize("width", [4096, 5120, 8192, 2048, 60])
def test_the_two_numbers_that_give_the_width_of_the_mlp(width: int, inner: int) -> None:
    assert width_of_the_mlp({"dim": width, **foreign._meta_mlp_params(width, inner)}) == inner


def test_the_numbers_are_metas_own_where_it_published_some() -> None:
    assert foreign._meta_mlp_params(4096, 11008) == {"multiple_of": 256}
    assert foreign._meta_mlp_params(5120, 13824) == {"multiple_of": 256}


def test_other_files_are_refused(tmp_path: Path) -> None:
    source = open_source(llamas.one_file(tmp_path / "a.safetensors"))
    with pytest.raises(HeadwiseError, match="files='pickle'"):
        convert_checkpoint(
            source, tmp_path / "b.safetensors", "llama", "llama-meta", files="pickle", heads=6
        )  # type: ignore[arg-type]


def test_the_target_is_a_folder_also_of_one_file(tmp_path: Path) -> None:
    model(tmp_path / "a")
    source, target = tmp_path / "a" / "model.safetensors", tmp_path / "b.safetensors"
    refused = COMMAND.refused(source, target, "--to", "llama-meta", "--as", "meta")
    assert refused.needed == "the name of a folder, because Meta's files need one"
    assert refused.do == str(tmp_path / "b")


def test_the_disk_needs_room_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "a")
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    disk = os.statvfs_result((1, 1, 0, 0, 3 * size // 2, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    refused = COMMAND.refused(tmp_path / "a", tmp_path / "b", "--to", "llama-meta", "--as", "meta")
    assert "free" in refused.saw
    COMMAND.run(tmp_path / "a", tmp_path / "b", "--to", "llama-meta")
