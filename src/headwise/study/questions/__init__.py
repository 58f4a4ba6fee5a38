"""One file for each question: what is measured, what must hold, what is said, and the picture.

A new one is a file here with a `Question` named ``QUESTION``, and its id in `studies/study.py`.
"""
