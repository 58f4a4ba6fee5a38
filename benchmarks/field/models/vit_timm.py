"""A ViT as in timm: huggingface/pytorch-image-models, timm/models/vision_transformer.py.

`VisionTransformer.forward(pixel_values)` takes images of (batch, 3, 20, 20) and returns the hidden
states after the last norm, the class token first.
"""
# ruff: noqa: N806

import torch
from torch import nn

PEER = (
    "ViTModel",
    {
        "hidden_size": 60,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "intermediate_size": 88,
        "image_size": 20,
        "patch_size": 4,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.2,
    },
)


class PatchEmbed(nn.Module):
    def __init__(self, img_size=20, patch_size=4, in_chans=3, embed_dim=60):
        super().__init__()
        self.grid_size = img_size // patch_size
        self.num_patches = self.grid_size**2
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x):
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2)  # BCHW -> BNC


class Attention(nn.Module):
    def __init__(self, dim, num_heads=5, qkv_bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)

        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, num_heads, mlp_hidden, eps=1e-6):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads=num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, mlp_hidden)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim=60, depth=4, num_heads=5, mlp_hidden=88):
        super().__init__()
        self.patch_embed = PatchEmbed(embed_dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.patch_embed.num_patches, embed_dim))
        self.blocks = nn.Sequential(
            *[Block(embed_dim, num_heads, mlp_hidden) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)

    def _pos_embed(self, x):
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.pos_embed

    def forward(self, pixel_values):
        x = self.patch_embed(pixel_values)
        x = self._pos_embed(x)
        x = self.blocks(x)
        return self.norm(x)


def convert(sd, depth):
    out = {
        "cls_token": sd["embeddings.cls_token"],
        "pos_embed": sd["embeddings.position_embeddings"],
        "patch_embed.proj.weight": sd["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": sd["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": sd["layernorm.weight"],
        "norm.bias": sd["layernorm.bias"],
    }
    for i in range(depth):
        src, dst = f"layers.{i}.", f"blocks.{i}."
        for p in ("weight", "bias"):
            q = sd[src + f"attention.q_proj.{p}"]
            k = sd[src + f"attention.k_proj.{p}"]
            v = sd[src + f"attention.v_proj.{p}"]
            out[dst + f"attn.qkv.{p}"] = torch.cat([q, k, v], dim=0)
            out[dst + f"attn.proj.{p}"] = sd[src + f"attention.o_proj.{p}"]
            out[dst + f"norm1.{p}"] = sd[src + f"layernorm_before.{p}"]
            out[dst + f"norm2.{p}"] = sd[src + f"layernorm_after.{p}"]
            out[dst + f"mlp.fc1.{p}"] = sd[src + f"mlp.fc1.{p}"]
            out[dst + f"mlp.fc2.{p}"] = sd[src + f"mlp.fc2.{p}"]
    return out


def make(peer):
    model = VisionTransformer().to(peer.dtype)
    model.load_state_dict(convert(peer.state_dict(), len(model.blocks)))
    return model


def inputs(generator):
    pixel_values = torch.randn(2, 3, 20, 20, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixel_values}
