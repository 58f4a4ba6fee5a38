"""Files of weights: checked before they are read, converted as a stream, written whole or not.

stored             a tensor that is not read yet
header             the head of a safetensors file: from bytes, checked, and to bytes
safetensors_file   .safetensors, memory-mapped
torch_file         .bin, .pt and .pth, by torch.load(weights_only=True): no pickle is executed
folder             which files of a folder are its checkpoint
index              the index of a checkpoint in several files
source             a file, or a folder with one checkpoint, as one
target             which files will be written, byte by byte, before anything is read
journal            what is done and safe on the disk
working            the hidden folder that becomes the target by one rename
moving_bytes       from file to file, and from memory to file
stream             the steps of a conversion, one after the other
conversion         all of it: `convert_checkpoint`
counts             heads and so on, from the config and from the caller
config             what a config.json says of attention; config_fields: each field as its type
against_config     what it says against a layout
layer_options      the options of a layer that it says
candidates         the layouts that names and shapes allow, and the damage in the others
detect             which of them a file is in; evidence: decided by values
verify             whether two files hold the same function; entries: where two tensors differ
digests            SHA-256 of every tensor
stored_model       a model of transformers in a folder, loaded
"""
