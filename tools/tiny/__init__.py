"""The training of `headwise.bundled_models.tiny`: its text, its batches, its measures."""
