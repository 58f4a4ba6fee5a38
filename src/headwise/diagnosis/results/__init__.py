"""Results of comparisons and of detection."""
