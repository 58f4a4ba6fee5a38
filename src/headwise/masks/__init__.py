"""Who may be attended, and what is added to the scores."""
