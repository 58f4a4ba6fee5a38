"""timm's ViT with QK norm (huggingface/pytorch-image-models, timm/models/vision_transformer.py)."""
# ruff: noqa: N806

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 70,
    "num_heads": 7,
    "qk_norm": {"kind": "layer", "eps": 1e-6, "over": "head"},
}
TAKES = ()


class Attention(nn.Module):
    def __init__(
        self,
        dim,
        num_heads=8,
        qkv_bias=False,
        qk_norm=False,
        attn_drop=0.0,
        proj_drop=0.0,
    ):
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5

        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = self.q_norm(q)
        k = self.k_norm(k)

        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x  # noqa: RET504


def checkpoint_filter_fn(weights):
    """The names of a checkpoint of timm."""
    out_dict = {}
    out_dict["qkv.weight"] = torch.cat([weights["wq"], weights["wk"], weights["wv"]], dim=0)
    out_dict["qkv.bias"] = torch.cat([weights["bq"], weights["bk"], weights["bv"]], dim=0)
    out_dict["q_norm.weight"] = weights["q_norm"]
    out_dict["q_norm.bias"] = weights["q_norm_bias"]
    out_dict["k_norm.weight"] = weights["k_norm"]
    out_dict["k_norm.bias"] = weights["k_norm_bias"]
    out_dict["proj.weight"] = weights["wo"]
    out_dict["proj.bias"] = weights["bo"]
    return out_dict


def make(weights):
    model = Attention(SETTINGS["embed_dim"], SETTINGS["num_heads"], qkv_bias=True, qk_norm=True)
    model = model.to(weights["wq"].dtype)
    model.load_state_dict(checkpoint_filter_fn(weights), strict=True)
    model.eval()
    return model
