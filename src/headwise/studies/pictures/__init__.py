"""What the pictures of the questions share: colours, maps of weights, a sheet to draw on."""
