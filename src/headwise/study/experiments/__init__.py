"""Experiments of the study: one experiment a file, or code that several questions share."""
