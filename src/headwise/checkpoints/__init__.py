"""Files of weights: checked before they are read, converted as a stream, written whole or not.

safetensors_file   .safetensors: the head from bytes, checked, and to bytes; tensors memory-mapped
torch_file         .bin, .pt and .pth, by torch.load(weights_only=True): no pickle is executed
source             a file, or a folder with one checkpoint by its names or an index, as one
target             which files will be written, byte by byte, before anything is read
working            the hidden folder that becomes the target by one rename, and its journal
conversion         all of it: `convert_checkpoint`
description        layout, counts, function and config, in the metadata of a converted file
meta_files         the files that Meta's code loads, made of safetensors files
model_args         the same as Meta's code and nanoGPT write it
config             what a config.json says of attention, each field as its type; heads and so on
layer_options      what it says against a layout, and the options of a layer that it says
attention          `load_attention`: one layer of a checkpoint
described_model    weights that describe themselves, in the layout of their model
digests            SHA-256 of every tensor
stored_model       a model of transformers in a folder, loaded
"""

from headwise.checkpoints.attention import load_attention

__all__ = ["load_attention"]
