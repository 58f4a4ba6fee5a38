"""Loads every port with and without edits; shows that the unedited port agrees and that each fault differs."""
import inspect, os, sys, tomllib, collections
import torch
from transformers import DynamicCache
torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))


def load(path, edits=()):
    text = open(path).read()
    for before, after in edits:
        assert text.count(before) == 1, ("edit not unique", before, text.count(before))
        text = text.replace(before, after)
    space = {"__name__": "port_" + os.path.basename(path)[:-3]}
    exec(compile(text, path, "exec"), space)
    return space["make"]()


def first(out):
    if isinstance(out, torch.Tensor):
        return out
    for name in ("logits", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out[0]


def call(f, inputs):
    if isinstance(inputs, dict):
        return first(f(**inputs))
    return first(f(inputs))


def rotary(module, x):
    """cos and sin as the module's own model makes them"""
    mod = sys.modules[[c.__module__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models")][0]]
    cls = [v for k, v in vars(mod).items() if k.endswith("RotaryEmbedding") and "Vision" not in k][0]
    pos = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    rope = cls(module.config)
    if "layer_type" in inspect.signature(cls.forward).parameters:
        return rope(x, pos, module.config.layer_types[module.layer_idx])
    return rope(x, pos)


def width(module):
    return getattr(module.config, "hidden_size", None) or module.config.d_model


def module_kwargs(ref, x):
    params = inspect.signature(type(ref).forward).parameters
    kw = {}
    B, T = x.shape[:2]
    causal = getattr(ref, "is_causal", True)
    mask = torch.zeros(1, 1, T, T)
    if causal:
        mask = mask.masked_fill(torch.ones(T, T).triu(1).bool(), torch.finfo(torch.float32).min)
    kw["attention_mask"] = mask.expand(B, 1, T, T)
    if "position_embeddings" in params:
        kw["position_embeddings"] = rotary(ref, x)
    return kw


def alone(port, ref):
    torch.manual_seed(7)
    x = torch.randn(2, 12, width(ref))
    kw = module_kwargs(ref, x)
    return first(port(x, **kw)), first(ref(x, **kw))


SPLITS = [(12,), (5, 1, 1, 3, 2), (1,) * 12, (4, 4, 4), (7, 5)]


def cached(port, ref):
    torch.manual_seed(7)
    x = torch.randn(2, 12, width(ref))
    kw = module_kwargs(ref, x)
    want = first(ref(x, **kw))
    gots = []
    for split in SPLITS:
        outs, at = [], 0
        state = None
        has_step = hasattr(port, "step")
        target = port.forward if isinstance(port, torch.nn.Module) else port
        params = {} if has_step else inspect.signature(target).parameters
        if has_step:
            state = port.start(x.shape[0])
        dyn = "past_key_values" in params and "hidden_states" in params
        if dyn:
            cache = DynamicCache()
        for n in split:
            part = x[:, at:at + n]
            if has_step:
                y, state = port.step(part, state)
            elif dyn:
                k = {"attention_mask": kw["attention_mask"][:, :, at:at + n, :at + n], "past_key_values": cache}
                if "position_embeddings" in kw:
                    k["position_embeddings"] = tuple(t[:, at:at + n] for t in kw["position_embeddings"])
                y = first(port(part, **k))
            else:
                name = "cache" if "cache" in params else "past_key_values"
                y, state = port(part, **{name: state})
            outs.append(y)
            at += n
        gots.append(torch.cat(outs, 1))
    return torch.stack(gots), torch.stack([want] * len(SPLITS))


@torch.no_grad()
def difference(sub, path, edits=()):
    port, ref, inputs = load(path, edits)
    if sub == "cached":
        a, b = cached(port, ref)
    elif inputs is None:
        a, b = alone(port, ref)
    else:
        a, b = call(port, inputs), call(ref, inputs)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert torch.isfinite(b).all()
    d = ((a - b).norm() / b.norm()).item()
    if sub == "cached":
        per = ((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).tolist()
        return max(per) if d == d else float("inf"), ["%.0e" % p for p in per]
    return d if d == d else float("nan"), None


def main():
    bad, counts, names = 0, collections.Counter(), collections.Counter()
    subs = sys.argv[1:2] or ["modules", "models", "cached"]
    for sub in subs:
        for f in sorted(os.listdir(os.path.join(HERE, sub))):
            if not f.endswith(".py"):
                continue
            path = os.path.join(HERE, sub, f)
            try:
                d, _ = difference(sub, path)
                ok = d < 1e-5
            except Exception as e:
                ok, d = False, repr(e)[:300]
            print(("ok  " if ok else "BAD ") + f"{sub}/{f} unedited {d}")
            bad += not ok
            for case in tomllib.load(open(path[:-3] + ".toml", "rb"))["case"]:
                try:
                    d, per = difference(sub, path, case["edits"])
                    ok = d < 1e-5 if case["kind"] == "same" else d > 1e-3
                except Exception as e:
                    ok, d, per = False, repr(e)[:300], None
                assert case["kind"] != "pair" or len(case["cause"]) == 2
                bad += not ok
                counts[sub, case["kind"]] += 1
                print(("ok  " if ok else "BAD ") + f"     {case['kind']:6} {case['name']:44} {d} {per or ''}")
    print(dict(counts), "bad:", bad)


main()
