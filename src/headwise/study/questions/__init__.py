"""Questions of the study: NAME.py measures, checks and draws; NAME.md is the text."""
