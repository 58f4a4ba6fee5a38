"""Definition of an attention function: settings, weights, stages, rounding and formulas."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.function.rotary import axes_of_sections as axes_of_sections
    from headwise.function.scaling import DynamicScaling as DynamicScaling
    from headwise.function.scaling import LinearScaling as LinearScaling
    from headwise.function.scaling import Llama3Scaling as Llama3Scaling
    from headwise.function.scaling import LongScaling as LongScaling
    from headwise.function.scaling import NTKScaling as NTKScaling
    from headwise.function.scaling import ProportionalScaling as ProportionalScaling
    from headwise.function.scaling import Scaling as Scaling
    from headwise.function.scaling import YarnScaling as YarnScaling
    from headwise.function.spec import ABSENT as ABSENT
    from headwise.function.spec import FROM_CONFIG as FROM_CONFIG
    from headwise.function.spec import AlibiRule as AlibiRule
    from headwise.function.spec import AttentionSpec as AttentionSpec
    from headwise.function.spec import BucketRule as BucketRule
    from headwise.function.spec import DifferentialRule as DifferentialRule
    from headwise.function.spec import DisentangledRule as DisentangledRule
    from headwise.function.spec import Latent as Latent
    from headwise.function.spec import NormRule as NormRule
    from headwise.function.spec import Other as Other
    from headwise.function.spec import RotaryRule as RotaryRule
    from headwise.function.spec import ScaleRule as ScaleRule
    from headwise.function.spec import Softcap as Softcap
    from headwise.function.spec import TemperatureRule as TemperatureRule
    from headwise.function.spec import ValueRule as ValueRule

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "rotary": "axes_of_sections",
        "scaling": "DynamicScaling LinearScaling Llama3Scaling LongScaling NTKScaling "
        "ProportionalScaling Scaling YarnScaling",
        "spec": "ABSENT AlibiRule AttentionSpec BucketRule DifferentialRule DisentangledRule "
        "FROM_CONFIG Latent NormRule Other RotaryRule ScaleRule Softcap TemperatureRule ValueRule",
    },
)
