"""Loads every port with and without the edits of its cases and says whether it differs from its reference as written down.

python check.py [part of a file's name ...]
"""
import copy
import glob
import inspect
import logging
import os
import sys
import tomllib
import types
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
CALLS = [5, 3, 1, 1, 2, 1]


def load(path, edits=()):
    text = open(path).read()
    for before, after in edits:
        assert text.count(before) == 1, f"stands {text.count(before)} times: {before!r}"
        text = text.replace(before, after)
    m = types.ModuleType("port_" + os.path.basename(path)[:-3])
    exec(compile(text, path, "exec"), m.__dict__)
    return m.make()


def first(out):
    if torch.is_tensor(out):
        return out
    if isinstance(out, (tuple, list)):
        return out[0]
    for k in ("logits", "last_hidden_state"):
        if getattr(out, k, None) is not None:
            return getattr(out, k)
    raise TypeError(type(out))


def causal(q, k, batch=2):
    i = torch.arange(k - q, k)[:, None]
    m = torch.zeros(q, k).masked_fill(torch.arange(k)[None] > i, torch.finfo(torch.float32).min)
    return m[None, None].expand(batch, 1, q, k).contiguous()


def rotary(ref, x, start=0):
    names = inspect.signature(type(ref).forward).parameters
    out = {}
    pos = torch.arange(start, start + x.shape[1])[None].expand(x.shape[0], -1)
    if "position_ids" in names:
        out["position_ids"] = pos
    if "position_embeddings" in names:
        home = sys.modules[type(ref).__module__]
        cls = [c for n, c in vars(home).items() if n.endswith("RotaryEmbedding") and isinstance(c, type)][0]
        emb = cls(copy.deepcopy(ref.config))
        kw = {}
        if "layer_type" in inspect.signature(emb.forward).parameters:
            kw["layer_type"] = ref.config.layer_types[ref.layer_idx]
        out["position_embeddings"] = emb(x, pos, **kw)
    if "alibi" in names:
        out["alibi"] = None
    return out


def width(ref):
    c = getattr(ref, "config", None)
    return getattr(c, "hidden_size", None) or getattr(c, "d_model")


def mask_name(ref):
    return "mask" if "mask" in inspect.signature(type(ref).forward).parameters else "attention_mask"


def run_plain(port, ref, inputs):
    torch.manual_seed(99)
    if inputs is None:
        x = torch.randn(2, 13, width(ref))
        kw = rotary(ref, x)
        kw[mask_name(ref)] = causal(13, 13) if getattr(ref, "is_causal", False) else None
        return first(port(x, **kw)), first(ref(x, **kw))
    if torch.is_tensor(inputs):
        return first(port(inputs)), first(ref(inputs))
    return first(port(**inputs)), first(ref(**inputs))


def run_calls(port, ref, inputs, calls=CALLS):
    from transformers import DynamicCache

    torch.manual_seed(98)
    T = sum(calls)
    pad = None
    if isinstance(inputs, dict) and "hidden_states" in inputs:
        x = inputs["hidden_states"]
        pad = inputs.get("attention_mask")
        T = x.shape[1]
    else:
        x = torch.randn(2, T, width(ref))
    b = x.shape[0]
    want = causal(T, T, b)
    kw = rotary(ref, x)
    kw[mask_name(ref)] = want
    whole = first(ref(x, **kw))
    outs, at = [], 0
    hf = False
    if hasattr(port, "start"):
        state = port.start(b)
        for n in calls:
            o, state = port.step(x[:, at : at + n], state)
            outs.append(o)
            at += n
    else:
        f = port.forward if isinstance(port, torch.nn.Module) else port
        names = inspect.signature(f).parameters
        hf = "position_embeddings" in names or "attention_mask" in names
        if hf:
            cache = DynamicCache()
            key = [k for k in ("past_key_values", "layer_past") if k in names][0]
            for n in calls:
                piece = x[:, at : at + n]
                k2 = rotary(ref, piece, at)
                k2[mask_name(ref)] = want[:, :, at : at + n, : at + n]
                outs.append(first(port(piece, **{key: cache}, **k2)))
                at += n
        else:
            key = "cache" if "cache" in names else "past_key_values"
            cache = None
            for n in calls:
                o, cache = port(x[:, at : at + n], **{key: cache})
                outs.append(o)
                at += n
    return torch.cat(outs, 1), whole


def differ(path, edits):
    port, ref, inputs = load(path, edits)
    with torch.no_grad():
        fn = run_calls if os.sep + "cached" + os.sep in path else run_plain
        a, b = fn(port, ref, inputs)
        if b.shape != a.shape:
            return float("inf")
        return ((a - b).norm() / b.norm()).item()


def main():
    wanted = sys.argv[1:]
    bad, n, kinds = 0, 0, {}
    for path in sorted(glob.glob(os.path.join(HERE, "*", "*.py"))):
        rel = os.path.relpath(path, HERE)
        if wanted and not any(w in rel for w in wanted):
            continue
        try:
            d = differ(path, [])
        except Exception as e:
            print(f"BAD  {rel}: {type(e).__name__}: {e}")
            bad += 1
            continue
        ok = d < 1e-5
        bad += not ok
        print(f"{'ok ' if ok else 'BAD'}  {rel} {d:.1e}")
        cases = tomllib.load(open(path[:-3] + ".toml", "rb"))["case"]
        assert len({c["name"] for c in cases}) == len(cases), rel
        for c in cases:
            n += 1
            key = (rel.split(os.sep)[0], c["kind"])
            kinds[key] = kinds.get(key, 0) + 1
            try:
                d = differ(path, c["edits"])
                ok = d < 1e-5 if c["kind"] == "same" else d > 1e-3 and d == d
            except Exception as e:
                d, ok = float("nan"), False
                print("    ", type(e).__name__, e)
            if c["kind"] == "pair" and ok:
                # each of the two faults must show by itself (the edits of a pair are one or more for each fault)
                for half in c["edits"] if len(c["edits"]) == 2 else []:
                    h = differ(path, [half])
                    ok = ok and h > 1e-3
                assert len(c["cause"]) == 2
            bad += not ok
            print(f"   {'ok ' if ok else 'BAD'} {c['kind']:6} {c['name']} {d:.1e}")
    print(n, "cases;", bad, "bad;", {"/".join(k): v for k, v in sorted(kinds.items())})
    return bad


if __name__ == "__main__":
    sys.exit(bool(main()))
