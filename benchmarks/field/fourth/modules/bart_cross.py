import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


def draw(module, std, seed):
    """Weights wide enough that the softmax is not flat; biases and gains drawn too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("sinks"):
                p.normal_(0.5, 1.0)
            elif p.dim() < 2 or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.normal_(0, std)
    return module.eval()

from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import BartAttention, BartForConditionalGeneration


class CrossAttention(BartAttention):
    """Cross-attention without the cache's branches."""

    def forward(self, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs):
        B, T, C = hidden_states.shape
        memory = key_value_states
        heads = lambda t: t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        q, k, v = heads(self.q_proj(hidden_states)), heads(self.k_proj(memory)), heads(self.v_proj(memory))
        scores = q @ k.mT * self.scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        y = scores.softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(B, T, C)), None


def make():
    config = BartConfig(d_model=48, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=80, max_position_embeddings=40, pad_token_id=1,
                        bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
                        attn_implementation="eager")
    reference = draw(BartForConditionalGeneration(config), 0.25, 151)
    port = copy.deepcopy(reference)
    for i, layer in enumerate(port.model.decoder.layers):
        mine = CrossAttention(48, 4, is_decoder=True, config=config, layer_idx=i)
        mine.load_state_dict(layer.encoder_attn.state_dict())
        layer.encoder_attn = mine
    torch.manual_seed(14)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, 10:] = 0
    return port.eval(), reference, {"input_ids": torch.randint(3, 80, (2, 15)), "attention_mask": mask,
                                    "decoder_input_ids": torch.randint(3, 80, (2, 11)), "use_cache": False}
