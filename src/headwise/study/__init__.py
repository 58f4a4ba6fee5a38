"""Study of common questions about attention heads, answered by experiments."""
