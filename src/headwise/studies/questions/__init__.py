"""One file for each question: what is measured, what must hold, what is said and drawn.

A new one is a file here with a `Question` named ``QUESTION``, and its name in `studies/catalogue`.
"""
