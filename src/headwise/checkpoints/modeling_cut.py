"""A model of transformers whose attention modules have numbers of heads of their own.

headwise wrote it; transformers alone loads it: from_pretrained(folder, trust_remote_code=True).
"""

import transformers
from torch import nn


class CutConfig:  # of the original class, under a model_type that transformers alone does not know
    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        values, unused = super().get_config_dict(*args, **kwargs)
        return {**values, "model_type": cls.model_type}, unused

    def to_diff_dict(self):
        return {**super().to_diff_dict(), "model_type": "headwise_cut"}

    def __getattr__(self, name):  # of an attention with counts of its own: the rest is the model's
        return getattr(vars(self).get("of_model"), name)


class CutModel:  # of the original class, whose modules get their sizes before weights are loaded
    is_custom_code = classmethod(lambda _: False)  # stored names are those of the original class

    def post_init(self):
        autos = {code.split(".")[-1]: auto for auto, code in self.config.auto_map.items()}
        type(self)._auto_class = autos.get(type(self).__name__)  # save_pretrained copies this file
        for name, module in [*self.named_modules()]:
            for path, sizes in self.config.headwise_cut["modules"].items():  # that differ
                if f".{name}".endswith(f".{path}"):  # models with a head have longer names
                    resize(module, sizes)
        super().post_init()


def resize(module, sizes):  # attributes, and shapes of parameters
    for name, value in sizes.items():
        if isinstance(value, list):  # of a parameter, which the original may lack
            value = nn.Parameter(next(module.parameters()).new_empty(value))
        elif isinstance(value, dict):  # counts that the class reads in its config
            vars(value := CutConfig()).update(sizes[name], of_model=module.config)
        setattr(module, name, no_heads.__get__(module) if name == "forward" else value)
    module._is_hf_initialized = False  # weights that no file has are drawn anew


def no_heads(module, hidden_states, *_, past_key_values=None, layer_past=None, **given):
    cache = layer_past if past_key_values is None else past_key_values  # which counts the tokens
    if cache is not None and given.get("key_value_states") is None:
        state = hidden_states[:, None, :, :1]
        getattr(cache, "self_attention_cache", cache).update(state, state, module.layer_idx)
    output = getattr(module, module.output_name, None)  # the projection, if it is in the module
    return hidden_states[..., :0] if output is None else output.bias.expand_as(hidden_states), None


def __getattr__(name):  # the class of transformers of this name, with the changes above
    original = getattr(transformers, name.removeprefix("Cut"))
    fields = {"__module__": __name__, "__doc__": original.__doc__}
    if (parent := CutConfig if name.startswith("Cut") else CutModel) is CutModel:
        fields["config_class"] = __getattr__(f"Cut{original.config_class.__name__}")
    return globals().setdefault(name, type(name, (parent, original), fields))
