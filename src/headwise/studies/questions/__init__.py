"""One file for each question: what is measured, what must hold, and what is said.

A new one is a file here with a `Question` named ``QUESTION``, its picture in a file of the same
name in `studies/pictures`, and its id in `studies/catalogue`.
"""
