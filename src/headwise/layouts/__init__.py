"""Weight layouts as data: describe any of them and convert between them, losslessly.

canonical   the one form that all others are described against: the paper's, head by head
pattern     the language of a stored tensor, named axes nested and fused; and both directions of it
sizes       what the axes measure, from shapes and a few known counts
function    what makes the same weights another function, and is in no tensor
layout      all of it together: `Layout`
catalogue/  the layouts that are published, each with its source
"""
