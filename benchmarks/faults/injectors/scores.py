"""Scores with another scale or softcap, and sinks."""

from __future__ import annotations

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.injectors.injector import Injector, names_of_a_scale
from benchmarks.faults.reference_layer import ReferenceLayer


class _Scores(Injector):
    family = "scores"


class Scale(_Scores):
    """Another scale (train-llm-from-scratch #3, tiny-transformers #71, scaling-matrix #2)."""

    name = "scale"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take another published scale."""
        g = layer.geometry
        forms = {
            "1": 1.0,
            "embed_dim ** -0.5": g.embed_dim**-0.5,
            "head_dim ** -0.25": g.head_dim**-0.25,
            "head_dim ** -0.5 / 3": g.head_dim**-0.5 / 3,
        }
        form = draw.choice(sorted(forms))
        return self.case(
            layer,
            layer.with_geometry(scale=forms[form]),
            draw,
            stage="scores",
            parameters={"scale": forms[form], "form": form},
            equals=names_of_a_scale(g) - {self.name},
        )


class ScaleTwice(_Scores):
    """The scale is applied to q and again to the scores (GRPO-Zero #10)."""

    name = "scale twice"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Square the scale."""
        scale = layer.geometry.plain_scale**2
        faulty = layer.with_geometry(scale=scale)
        equals = names_of_a_scale(layer.geometry)
        return self.case(
            layer, faulty, draw, stage="scores", parameters={"scale": scale}, equals=equals
        )


class Softcap(_Scores):
    """The softcap is missing, added or another (sglang #33915, vllm-metal #665)."""

    name = "softcap"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Change the softcap."""
        options = [cap for cap in (None, 5.0, 30.0, 50.0) if cap != layer.geometry.softcap]
        softcap = draw.choice(options)
        faulty = layer.with_geometry(softcap=softcap)
        return self.case(layer, faulty, draw, stage="scores", parameters={"softcap": softcap})


class Sink(_Scores):
    """Sinks are missing, or added to a layer without (TransformerLens #1618)."""

    name = "sinks"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Remove the sinks, or add one logit a head."""
        g = layer.geometry
        if g.sink:
            faulty = layer.with_geometry(sink=False).with_weights(sink=None)
            return self.case(layer, faulty, draw, stage="weights", parameters={"sink": None})
        logits = draw.normal(g.num_heads)
        faulty = layer.with_geometry(sink=True).with_weights(sink=logits)
        parameters = {"sink": tuple(logits.tolist())}
        return self.case(layer, faulty, draw, stage="weights", parameters=parameters)


INJECTORS = (Scale(), ScaleTwice(), Softcap(), Sink())
