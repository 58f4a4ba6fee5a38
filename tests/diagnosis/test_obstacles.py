"""Weights that no layout fits, and files of other formats: the reason and the next step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise import detect, verify
from headwise.errors import CheckpointError, UndecidedError

AT = "model.layers.0.self_attn."
PROJECTIONS = [f"{AT}{role}_proj" for role in "qkvo"]
LLAMA = {f"{name}.weight": torch.randn(24, 24) for name in PROJECTIONS}


# A tensor of transformers beside the projections -> what it adds to the scores.
SCORES = {
    "linear_pos.weight": "Transformer-XL's relative positions",  # Conformer
    "bias_u": "Transformer-XL's relative positions",  # Parakeet
    "r_w_bias": "Transformer-XL's relative positions",  # XLNet, Funnel
    "distance_embedding.weight": "Shaw's relative positions",  # Wav2Vec2-BERT
    "rel_pos_emb.weight": "Shaw's relative positions",  # Granite Speech
    "relative_position_bias_table": "a table by place in the window",  # Swin
    "continuous_position_bias_mlp.0.weight": "an MLP of the place in the window",  # Swin v2
    "rel_pos_h": "rows and columns of the unscaled query",  # SAM
    "gru_rel_pos_const": "a gated table of distances",  # WavLM
    "rel_logits_proj.proj": "a table of distances for each query",  # Inkling
}


def of_each(*parts: str) -> dict[str, Tensor]:
    return {f"{name}.{part}": torch.zeros(3, 5) for name in PROJECTIONS for part in parts}


@pytest.mark.parametrize(
    ("state", "reason", "do"),
    [
        (of_each("qweight", "qzeros", "scales", "g_idx"), "by GPTQ", "that was quantised"),
        (of_each("qweight", "qzeros", "scales"), "by AWQ", "that was quantised"),
        (of_each("weight", "weight.absmax", "weight.quant_map"), "by bitsandbytes", "dequantize"),
        (of_each("weight", "SCB"), "by bitsandbytes", "dequantize"),
        (of_each("weight", "scales", "biases"), "by MLX", "--dequantize"),
        (LLAMA | of_each("weight_scale_inv"), "scales beside them", "that was quantised"),
        (of_each("lora_A.weight", "lora_B.weight"), "adapters of peft", "merge_and_unload"),
        (
            {f"{AT}{n}.weight": torch.zeros(3, 5) for n in ("kv_b_proj", "indexer.wk")},
            "chooses keys",
            "headwise scan",
        ),
        *(
            (LLAMA | {f"{AT}{name}": torch.zeros(3, 5)}, form, "AttentionMatrix")
            for name, form in SCORES.items()
        ),
        (
            LLAMA | {f"{AT}extra.weight": torch.zeros(3)},
            f"but for `{AT}extra.weight`",
            "leave these tensors out",
        ),
    ],
    ids=[
        "gptq", "awq", "nf4", "int8", "mlx", "float8", "adapters", "chosen", *SCORES, "one more",
    ],
)  # fmt: skip
def test_the_reason_is_named(state: dict[str, Tensor], reason: str, do: str) -> None:
    found = detect(state, heads=4)
    assert found.layout is None
    assert found.obstacle is not None
    assert reason in found.obstacle.reason
    assert do in found.obstacle.do
    assert reason in str(found)
    with pytest.raises(UndecidedError) as error:
        verify(state, state, heads=4)
    assert reason in str(error.value)
    assert do in str(error.value).splitlines()[2]


def test_what_is_known_has_no_obstacle() -> None:
    assert detect(LLAMA, heads=4).obstacle is None
    assert detect({"x": torch.zeros(3)}).obstacle is None


@pytest.mark.parametrize(
    ("suffix", "way"),
    [
        (".gguf", "gguf_file=name"),
        (".distcp", "dcp_to_torch_save"),
        (".h5", "h5py.File"),
        (".msgpack", "msgpack_restore"),
        (".onnx", "graph.initializer"),
        (".npz", "numpy.load"),
    ],
)
def test_files_of_other_formats(tmp_path: Path, suffix: str, way: str) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"bytes of it")
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError) as error:
            detect(path)
        assert way in str(error.value).splitlines()[2]


def test_arrays_of_an_npz_are_saved_as_the_message_says(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **{name: x.numpy() for name, x in LLAMA.items()})
    with pytest.raises(CheckpointError) as error:
        detect(path)
    code = str(error.value).splitlines()[2].removeprefix("  do:     ")
    making, _, saving = code.partition(", then ")
    given = {"torch": torch, "numpy": np, "path": path, "save_file": save_file}
    exec(making, given)
    exec(saving.partition(" of ")[0].replace("model.s", f"{tmp_path}/model.s"), given)
    assert "llama" in str(detect(tmp_path / "model.safetensors", heads=4))


def test_a_pointer_of_git_lfs_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        detect(tmp_path)


def test_a_folder_of_the_hub_names_its_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="snapshot_download"):
        detect(folder)
    snapshot = folder / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    save_file(LLAMA, snapshot / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        detect(folder)
    assert "llama" in str(detect(str(error.value).split("name the snapshot: ")[1], heads=4))
