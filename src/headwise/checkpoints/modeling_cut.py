"""A model of transformers whose attention modules have numbers of heads of their own.

`headwise prune` and `headwise regroup` copy this file beside the weights of a model that lost
heads. It needs transformers alone: ``AutoModel.from_pretrained(folder, trust_remote_code=True)``.
In config.json, ``headwise_cut`` lists the modules that differ from those of the original class:
their attributes, and the shapes of their parameters as lists.
"""

from typing import Any

import transformers
from torch import nn

NAME = "headwise_cut"  # the model_type in config.json, and the field with the modules


class CutConfig:
    """Config of the original class, under a model_type that transformers alone does not know."""

    @classmethod
    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        values, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        return {**values, "model_type": cls.model_type}, unused

    def to_diff_dict(self) -> dict[str, Any]:
        return {**super().to_diff_dict(), "model_type": NAME}  # type: ignore[misc]


class CutModel:
    """Model of the original class, whose modules get their sizes before weights are loaded."""

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # names of tensors are those of the original class

    def post_init(self: Any) -> None:
        for auto, code in self.config.auto_map.items():
            if code.endswith(f".{type(self).__name__}"):
                type(self)._auto_class = auto  # save_pretrained copies this file
        for name, module in self.named_modules():
            for path, sizes in getattr(self.config, NAME)["modules"].items():
                if f".{name}".endswith(f".{path}"):  # a class with a head has a longer name
                    resize(module, sizes)
        super().post_init()  # type: ignore[misc]


def resize(module: Any, sizes: dict[str, Any]) -> None:
    for name, value in sizes.items():
        if isinstance(value, list):  # the shape of a parameter, which the original may lack
            like = module.weight if getattr(module, name, None) is None else getattr(module, name)
            value = nn.Parameter(like.new_empty(value))
        setattr(module, name, value)
    module._is_hf_initialized = False


def __getattr__(name: str) -> Any:
    """Return the class of this name: of transformers, with the changes above."""
    if name.startswith("_"):
        raise AttributeError(name)
    is_config = name.startswith("Cut") and name.endswith("Config")
    original = getattr(transformers, name.removeprefix("Cut") if is_config else name)
    fields = {"__module__": __name__, "__doc__": original.__doc__}
    if not is_config:
        config = f"Cut{original.config_class.__name__}"
        fields["config_class"] = globals().get(config) or __getattr__(config)
    parent = CutConfig if is_config else CutModel
    return globals().setdefault(name, type(name, (parent, original), fields))
