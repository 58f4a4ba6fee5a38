"""RoBERTa in fairseq (facebookresearch/fairseq, fairseq/modules/multihead_attention.py)."""

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {"embed_dim": 63, "num_heads": 7}
TAKES = ("mask",)


class MultiheadAttention(nn.Module):
    """Attention over (time, batch, channel)."""

    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key_padding_mask=None):
        """key_padding_mask is (batch, src_len), nonzero where a key is padding."""
        tgt_len, bsz, embed_dim = query.size()
        src_len = tgt_len

        q = self.q_proj(query)
        k = self.k_proj(query)
        v = self.v_proj(query)
        q = q * self.scaling

        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights.masked_fill(
                key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf")
            )
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)

        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class RobertaSelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)

    def forward(self, x, mask=None):
        padding = None if mask is None else ~mask[:, 0, 0]
        x = x.transpose(0, 1)  # B x T x C -> T x B x C
        x = self.self_attn(x, key_padding_mask=padding)
        return x.transpose(0, 1)


def make(weights):
    layer = RobertaSelfAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    state_dict = {}
    for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}.items():
        state_dict[f"self_attn.{theirs}.weight"] = weights[f"w{ours}"]
        state_dict[f"self_attn.{theirs}.bias"] = weights[f"b{ours}"]
    layer.to(weights["wq"].dtype).load_state_dict(state_dict, strict=True)
    return layer.eval()
