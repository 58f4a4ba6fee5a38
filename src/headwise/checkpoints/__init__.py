"""Files of weights: checked before they are read, converted as a stream, written whole or not.

safetensors_file   .safetensors: the head from bytes, checked, and to bytes; tensors memory-mapped
torch_file         .bin, .pt and .pth, by torch.load(weights_only=True): no pickle is executed
source             a file, or a folder with one checkpoint by its names or an index, as one
target             which files will be written, byte by byte, before anything is read
working            the hidden folder that becomes the target by one rename, and its journal
conversion         all of it: `convert_checkpoint`
config             what a config.json says of attention, each field as its type; heads and so on
layer_options      what it says against a layout, and the options of a layer that it says
digests            SHA-256 of every tensor
stored_model       a model of transformers in a folder, loaded
"""
