"""The layouts that are published, a file for each family, each with a tuple ``LAYOUTS``."""
