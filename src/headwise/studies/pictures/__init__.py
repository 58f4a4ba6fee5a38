"""The picture of each question, drawn from its numbers alone; and what they share.

`style` has the colours and maps of weights, `canvas` a sheet to draw on.
"""
