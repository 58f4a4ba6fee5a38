"""What the questions run: each file one experiment, or what several of them share."""
