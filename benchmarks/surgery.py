"""A Llama-shaped model with half of its groups out: ``python -m benchmarks.surgery``.

Attention's time and the file's bytes, beside those of the original, with random weights in float32.
The two models take turns in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.timing import wall_seconds
from headwise.surgery import Cut, ModelHeads, check_folder, cut_model, write

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 8, 16, 8, 64, 1024
BATCH, LENGTH, ROUNDS = 2, 256, 25
MOST = 0.6  # of attention's time


def make_model() -> Any:
    """Return the model before the cut."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=2 * WIDTH,
    )
    return transformers.LlamaForCausalLM(config).eval()


def without_half_of_the_groups(model: Any) -> Cut:
    """Return the cut that leaves every second group of each layer."""
    group = HEADS // KV_HEADS
    gone = [head for head in range(HEADS) if head // group % 2]
    return Cut({name: layer.drop(gone) for name, layer in ModelHeads(model).whole()})


def attention_of(model: Any) -> Callable[[], None]:
    """Return a function that runs the attention of all layers on the same input."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    places = torch.arange(LENGTH)[None]
    turned = model.model.rotary_emb(x, places)

    def run() -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn(x, position_embeddings=turned, attention_mask=None)

    return run


def removed_bytes() -> int:
    """Return the bytes of the projections of half of the groups, in float32."""
    heads, kv_heads = HEADS // 2, KV_HEADS // 2
    return LAYERS * (2 * heads + 2 * kv_heads) * HEAD_DIM * WIDTH * 4


def main() -> None:
    """Print the figures, and end with an error where one misses its limit."""
    model = make_model()
    cut = without_half_of_the_groups(model)
    small = cut_model(cut, model)
    runs = attention_of(small), attention_of(model)
    ratios = []
    for number in range(ROUNDS + 3):
        order = runs if number % 2 else runs[::-1]
        seconds = [wall_seconds(run) for run in order]
        ours, whole = seconds if number % 2 else seconds[::-1]
        if number >= 3:  # the first ones are warm-up
            ratios.append(ours / whole)
    ratio = statistics.median(ratios)
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        model.save_pretrained(source)
        made = write(cut, source, target)
        ids = torch.randint(3, 1000, (BATCH, 64))
        difference = check_folder(target, small, {"input_ids": ids})
    saved = made.nbytes_before - made.nbytes
    print(f"attention's time: {ratio:.2f} of the original (at most {MOST})")
    print(f"  range {min(ratios):.2f} to {max(ratios):.2f}, {torch.get_num_threads()} threads")
    print(f"file: {saved:,} bytes smaller, {removed_bytes():,} computed")
    print(f"plain transformers: largest difference {difference:.1e}, within the error budget")
    if ratio > MOST or saved != removed_bytes():
        raise SystemExit("a figure misses its limit")


if __name__ == "__main__":
    main()
