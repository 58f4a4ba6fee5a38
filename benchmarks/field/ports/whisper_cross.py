"""Whisper's cross attention, batched by bmm (huggingface/transformers, src/transformers/models/whisper/modeling_whisper.py)."""  # noqa: E501

import torch
from torch import nn

SETTINGS = {"embed_dim": 60, "num_heads": 5, "source_dim": 44, "bias": "qvo"}
TAKES = ("mask", "source")


class WhisperAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, kdim, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5

        self.k_proj = nn.Linear(kdim, embed_dim, bias=False)
        self.v_proj = nn.Linear(kdim, embed_dim, bias=True)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=True)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=True)

    def _shape(self, tensor, seq_len, bsz):
        tensor = tensor.view(bsz, seq_len, self.num_heads, self.head_dim)
        return tensor.transpose(1, 2).contiguous()

    def forward(self, hidden_states, key_value_states, attention_mask=None):
        bsz, tgt_len, _ = hidden_states.size()
        src_len = key_value_states.size(1)

        query_states = self.q_proj(hidden_states) * self.scaling
        key_states = self._shape(self.k_proj(key_value_states), -1, bsz)
        value_states = self._shape(self.v_proj(key_value_states), -1, bsz)

        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.view(*proj_shape)
        value_states = value_states.view(*proj_shape)

        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        if attention_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights + attention_mask
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)

        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_probs = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.bmm(attn_probs, value_states)

        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn_output)


def _expand_mask(mask, dtype, tgt_len):
    bsz, src_len = mask.shape
    expanded = mask[:, None, None, :].expand(bsz, 1, tgt_len, src_len).to(dtype)
    inverted = 1.0 - expanded
    return inverted.masked_fill(inverted.bool(), torch.finfo(dtype).min)


WHISPER_MAPPING = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}


def rename_keys(checkpoint):
    renamed = {}
    for key, value in checkpoint.items():
        module, kind = key.split(".")
        renamed[f"{WHISPER_MAPPING[module]}.{kind}"] = value
    return renamed


def make(weights):
    attn = WhisperAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"], SETTINGS["source_dim"])
    attn = attn.to(weights["wq"].dtype).eval()
    checkpoint = {
        "query.weight": weights["wq"],
        "query.bias": weights["bq"],
        "key.weight": weights["wk"],
        "value.weight": weights["wv"],
        "value.bias": weights["bv"],
        "out.weight": weights["wo"],
        "out.bias": weights["bo"],
    }
    attn.load_state_dict(rename_keys(checkpoint))

    def port(x, source, mask=None):
        if mask is not None:
            mask = _expand_mask(mask.reshape(mask.shape[0], -1), x.dtype, x.shape[1])
        return attn(x, source, attention_mask=mask)

    return port
