"""Training of `headwise.models.tiny`: corpus, batches and measurements."""
