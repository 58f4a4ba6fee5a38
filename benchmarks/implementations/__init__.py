"""`headwise.compare` between the attention implementations of one Hugging Face class."""
