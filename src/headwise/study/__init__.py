"""Questions about heads, each asked of a model and answered with numbers. No printing, no pages."""
