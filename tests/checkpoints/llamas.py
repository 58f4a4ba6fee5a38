"""A small llama on the disk, and its weights in Meta's layout by a closed form."""

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.checkpoints.conversion import ConversionReport, convert_checkpoint
from headwise.checkpoints.source import open_source

HEADS, KV_HEADS, HEAD_DIM, EMBED, INNER, VOCABULARY, LAYERS = 6, 2, 10, 40, 52, 33, 2
COUNTS = {"heads": HEADS, "kv_heads": KV_HEADS}
INDEX = "model.safetensors.index.json"
_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ONCE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
State = dict[str, Tensor]


def weights(dtype: torch.dtype = torch.bfloat16) -> State:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, EMBED),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, EMBED),
        "mlp.up_proj": (INNER, EMBED),
        "mlp.down_proj": (EMBED, INNER),
        "input_layernorm": (EMBED,),
        "post_attention_layernorm": (EMBED,),
    }
    full = {"model.embed_tokens.weight": (VOCABULARY, EMBED)}
    for layer in range(LAYERS):
        full |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    full |= {"model.norm.weight": (EMBED,), "lm_head.weight": (VOCABULARY, EMBED)}
    state = {name: torch.randn(s, generator=generator).to(dtype) for name, s in full.items()}
    for tensor in state.values():  # bits that arithmetic would change
        tensor.view(-1)[0], tensor.view(-1)[1] = -0.0, torch.nan
    return state


def in_metas(state: State) -> State:
    """What of a llama has a place in Meta's layout, by the published permutation of rows."""
    made = {}
    for name, x in state.items():
        layered = re.fullmatch(r"model\.(layers\.\d+\.)(.+)\.weight", name)
        if name in _ONCE:
            made[_ONCE[name]] = x
        elif layered and layered[2] in _NAMES:
            made[f"{layered[1]}{_NAMES[layered[2]]}.weight"] = _turned(layered[2], x)
    return made


def _turned(name: str, x: Tensor) -> Tensor:
    heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(name)
    if heads is None:
        return x
    head_dim = len(x) // heads
    return x.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(x.shape)


def one_file(path: Path, state: State | None = None) -> Path:
    save_file(weights() if state is None else state, path, metadata={"format": "pt", "by": "hand"})
    return path


def in_files(folder: Path, files: int = 3, *, pattern: str = "model-{:05}-of-{:05}") -> Path:
    """A folder with an index, as transformers writes it."""
    folder.mkdir()
    state, weight_map = weights(), {}
    each = -(-len(state) // files)
    for number in range(files):
        names = list(state)[number * each : (number + 1) * each]
        file = pattern.format(number + 1, files) + ".safetensors"
        save_file({n: state[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(x.nbytes for x in state.values())
    about = {"metadata": {"total_size": total}, "weight_map": weight_map}
    folder.joinpath(INDEX).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    config = {
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": EMBED,
        "head_dim": HEAD_DIM,
    }
    folder.joinpath("config.json").write_text(json.dumps(config))
    return folder


def to_meta(source: Path, target: Path, **options: object) -> ConversionReport:
    return convert_checkpoint(
        open_source(source), target, "llama", "llama-meta", **{**COUNTS, **options}
    )


def back(source: Path, target: Path) -> ConversionReport:
    return convert_checkpoint(open_source(source), target, "llama-meta", "llama", **COUNTS)


def read(place: Path) -> State:
    """All tensors of the safetensors files, as their own library reads them."""
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    state: State = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in state
                state[name] = file.get_tensor(name).clone()
    return state


def assert_same(a: State, b: State) -> None:
    assert sorted(a) == sorted(b), sorted(a.keys() ^ b.keys())
    for name, x in a.items():
        y = b[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        raw, other = (torch.cat([t.reshape(-1)]).view(torch.uint8) for t in (x, y))
        assert torch.equal(raw, other), name


def bytes_of(place: Path) -> dict[str, str]:
    """File -> digest; of one file, or of all below a folder."""
    files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
    return {str(f.relative_to(place)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
