"""Run and scan a Hugging Face model under transformers' own tensor-parallel plan.

    pip install 'headwise[huggingface]'
    torchrun --nproc-per-node=2 examples/huggingface_tp.py

Each process holds half of the heads. The weights are random, and nothing is downloaded. The output
and the scan are compared with those of the whole model.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import headwise
from headwise.sharding import scan_sharded


def main() -> None:
    dist.init_process_group("gloo")
    headwise.register_huggingface()
    torch.manual_seed(0)  # the same weights and tokens on every rank
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
    )
    whole = AutoModelForCausalLM.from_config(config, attn_implementation="headwise").eval()
    ids = torch.randint(config.vocab_size, (1, 40))

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # rank 0 writes the model, and all ranks read it
        whole.save_pretrained(folders[0])
        dist.barrier()
        sharded = AutoModelForCausalLM.from_pretrained(
            folders[0],
            distributed_config=DistributedConfig(tp_plan="auto"),
            attn_implementation="headwise",
        )
        dist.barrier()
    with torch.no_grad():
        apart = (sharded(ids).logits - whole(ids).logits).abs().max().item()
    scan = scan_sharded(sharded, ids)
    unsharded = headwise.scan(whole, ids)
    entropies = (scan["entropy"] - unsharded["entropy"]).abs().max().item()

    if dist.get_rank() == 0:
        held = sharded.model.layers[0].self_attn.q_proj.weight.to_local()
        print(f"each rank holds {len(held) // config.head_dim} of {len(scan.heads) // 2} heads")
        print(f"logits differ by at most {apart:.0e}, entropies by {entropies:.0e}")
    assert apart < 1e-5
    assert entropies < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
