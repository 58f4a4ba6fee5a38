"""What single heads do: statistics of an attention matrix, one number for each head."""
