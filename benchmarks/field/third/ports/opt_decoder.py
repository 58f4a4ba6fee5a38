"""OPT's decoder attention before the attention interface (transformers, opt/modeling_opt.py)."""

import torch
from torch import nn

SETTINGS = {"embed_dim": 54, "num_heads": 6, "causal": True, "bias": "qkvo"}
TAKES = ("mask",)


class OPTAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, bias=True):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _shape(self, tensor, seq_len, bsz):
        tensor = tensor.view(bsz, seq_len, self.num_heads, self.head_dim)
        return tensor.transpose(1, 2).contiguous()

    def forward(self, hidden_states, attention_mask):
        bsz, tgt_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states) * self.scaling
        key_states = self._shape(self.k_proj(hidden_states), -1, bsz)
        value_states = self._shape(self.v_proj(hidden_states), -1, bsz)

        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.view(*proj_shape)
        value_states = value_states.view(*proj_shape)
        src_len = key_states.size(1)

        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len) + attention_mask
        lowest = torch.tensor(torch.finfo(attn_weights.dtype).min, dtype=attn_weights.dtype)
        attn_weights = torch.max(attn_weights, lowest)
        attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)

        attn_output = torch.bmm(attn_weights, value_states)
        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn_output)


def make_causal_mask(tgt_len, dtype):
    mask = torch.full((tgt_len, tgt_len), torch.finfo(dtype).min, dtype=dtype)
    mask_cond = torch.arange(tgt_len)
    mask.masked_fill_(mask_cond < (mask_cond + 1).view(tgt_len, 1), 0)
    return mask[None, None]


def expand_mask(mask, dtype):
    """(bsz, src_len), one where a token may be seen, to an additive mask."""
    bsz, src_len = mask.size()
    inverted = 1.0 - mask[:, None, None, :].expand(bsz, 1, src_len, src_len).to(dtype)
    return inverted.masked_fill(inverted.bool(), torch.finfo(dtype).min)


def convert_metaseq(checkpoint):
    """Rename the keys of a checkpoint of metaseq, whose fused rows are k, v, q."""
    state = {}
    for kind in ("weight", "bias"):
        fused = checkpoint[f"self_attn.qkv_proj.{kind}"]
        k, v, q = torch.split(fused, fused.shape[0] // 3, dim=0)
        state[f"q_proj.{kind}"] = q
        state[f"k_proj.{kind}"] = k
        state[f"v_proj.{kind}"] = v
        state[f"out_proj.{kind}"] = checkpoint[f"self_attn.out_proj.{kind}"]
    return state


def make(weights):
    checkpoint = {
        "self_attn.qkv_proj.weight": torch.cat([weights[f"w{role}"] for role in "kvq"]),
        "self_attn.qkv_proj.bias": torch.cat([weights[f"b{role}"] for role in "kvq"]),
        "self_attn.out_proj.weight": weights["wo"],
        "self_attn.out_proj.bias": weights["bo"],
    }
    attention = OPTAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    attention = attention.to(weights["wq"].dtype)
    attention.load_state_dict(convert_metaseq(checkpoint))
    attention.eval()

    def port(x, mask=None):
        attention_mask = make_causal_mask(x.shape[1], x.dtype)
        if mask is not None:
            attention_mask = attention_mask + expand_mask(mask[:, 0, 0], x.dtype)
        return attention(x, attention_mask)

    return port
