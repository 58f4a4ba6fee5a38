"""Cases of a cache: prompts of unequal lengths, steps of several tokens, beams, windows."""

import numpy as np
import torch

from headwise import Mask
from tests.fuzz import oracle_layers
from tests.fuzz.draw import Chance, plain
from tests.fuzz.findings import close
from tests.fuzz.layer_cases import draw_layer
from tests.fuzz.matrix_cases import describing
from tests.fuzz.oracle import Array


def cache_case(chance: Chance) -> str:
    """A schedule of calls, each sequence against its own full forward pass."""
    dtype = chance.choose((torch.float64, torch.float64, torch.float32))
    drawn = draw_layer(chance, dtype, decodes=True)
    layer, batch = drawn.layer.eval(), chance.choose((1, 2, 3))
    counts = [chance.between(1, 12), *(chance.choose((1, 1, 2, 5)) for _ in range(5))]
    roomy = layer.window is not None and chance.maybe()
    cache = layer.cache(batch=batch, length=200 if roomy else sum(counts))
    texts: list[list[Array]] = [[] for _ in range(batch)]
    outputs: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    said = [f"{drawn.said} batch={batch} slots={cache._k.shape[2]} steps"]
    with describing(said), torch.no_grad():
        for number, count in enumerate(counts):
            x = chance.laid_out(chance.normal(batch, count, layer.embed_dim, dtype=dtype))
            mask = None if layer.window is not None and chance.maybe() else Mask.causal()
            real = torch.full((batch,), count)
            if chance.maybe(0.6 if number == 0 else 0.25):
                real = chance.whole(0, count, batch)
                own = Mask.lengths(queries=real, keys=real)
                mask = own if mask is None else mask & own
                said.append(f"{count}:{real.tolist()}{str(real.dtype)[6:]}")
            else:
                said.append(str(count))
            out = layer(x, mask=mask, cache=cache)
            for row in range(batch):
                texts[row].append(plain(x[row, : int(real[row])]))
                outputs[row].append(out[row, : int(real[row])])
            if chance.maybe(0.15):
                order = torch.randint(0, batch, (batch,), generator=chance.generator)
                cache = cache.select(order)
                texts = [list(texts[i]) for i in order.tolist()]
                outputs = [list(outputs[i]) for i in order.tolist()]
        _compare(drawn.parameters(), drawn.options, texts, outputs, dtype)
    return " ".join(said)


def _compare(
    parameters: dict[str, Array],
    options: dict[str, object],
    texts: list[list[Array]],
    outputs: list[list[torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    for row, (text, found) in enumerate(zip(texts, outputs, strict=True)):
        x = np.concatenate(text)[None]
        if not x.size:
            continue
        given = parameters | {"x": x}
        _, _, expected = oracle_layers.attention(given, options, [("window", None, 0, None)], [])
        sums = x.shape[2] + 400
        allowed = x.shape[1] * sums * torch.finfo(dtype).eps * max(1.0, np.abs(expected).max())
        close(f"sequence {row}", torch.cat(found)[None], expected, float(allowed))
