"""Files of weights: checked before they are read, converted as a stream, written whole or not.

safetensors_file   .safetensors: the head from bytes, checked, and to bytes; tensors memory-mapped
torch_file         .bin, .pt and .pth, by torch.load(weights_only=True): no pickle is executed
folder             which files of a folder are its checkpoint: by their names, or by an index
source             a file, or a folder with one checkpoint, as one
target             which files will be written, byte by byte, before anything is read
working            the hidden folder that becomes the target by one rename, and its journal
moving_bytes       from file to file, and from memory to file
conversion         all of it: `convert_checkpoint`
config             what a config.json says of attention, each field as its type; heads and so on
against_config     what it says against a layout
layer_options      the options of a layer that it says
candidates         the layouts that names and shapes allow, and the damage in the others
detect             which of them a file is in; evidence: decided by values
digests            SHA-256 of every tensor
stored_model       a model of transformers in a folder, loaded
"""
