"""Questions of the study, one file each: experiment, facts, answer and picture.

To add a question, add a file with a `Question` named ``QUESTION``, and its id in `study/run.py`.
"""
