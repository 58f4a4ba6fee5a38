"""Training of `headwise.bundled_models.tiny`: corpus, batches and measurements."""
