"""The training of `headwise.models.tiny`: its text, its batches, its measures."""
