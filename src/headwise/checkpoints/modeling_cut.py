"""A model of transformers whose attention modules have numbers of heads of their own.

headwise wrote it beside the weights of a cut model. It needs transformers alone:
``AutoModel.from_pretrained(folder, trust_remote_code=True)``. In config.json, ``headwise_cut`` has
the modules that differ from the original's: attributes, and shapes of parameters as lists.
"""

import transformers
from torch import nn

NAME = "headwise_cut"  # the model_type in config.json, and the field with the modules


class CutConfig:
    """Config of the original class, under a model_type that transformers alone does not know."""

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        values, unused = super().get_config_dict(*args, **kwargs)
        return {**values, "model_type": cls.model_type}, unused

    def to_diff_dict(self):
        return {**super().to_diff_dict(), "model_type": NAME}


class CutModel:
    """Model of the original class, whose modules get their sizes before weights are loaded."""

    is_custom_code = classmethod(lambda _: False)  # stored names are those of the original class

    def post_init(self):
        for auto, code in (getattr(self.config, "auto_map", None) or {}).items():
            if code.endswith(f".{type(self).__name__}"):
                type(self)._auto_class = auto  # save_pretrained copies this file
        for name, module in self.named_modules():
            for path, sizes in getattr(self.config, NAME)["modules"].items():
                if f".{name}".endswith(f".{path}"):  # models with a head have longer names
                    resize(module, sizes)
        super().post_init()


def resize(module, sizes):
    for name, value in sizes.items():
        if isinstance(value, list):  # of a parameter, which the original may lack
            like = getattr(module, name, None)
            value = nn.Parameter((module.weight if like is None else like).new_empty(value))
        setattr(module, name, value)
    module._is_hf_initialized = False  # weights that no file has are drawn anew


def __getattr__(name):  # the class of transformers of this name, with the changes above
    is_config = name.startswith("Cut")
    original = getattr(transformers, name.removeprefix("Cut"))
    fields = {"__module__": __name__, "__doc__": original.__doc__}
    if not is_config:
        config = f"Cut{original.config_class.__name__}"
        fields["config_class"] = globals().get(config) or __getattr__(config)
    parents = (CutConfig if is_config else CutModel), original
    return globals().setdefault(name, type(name, parents, fields))
