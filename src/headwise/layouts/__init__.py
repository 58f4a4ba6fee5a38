"""Weight layouts as data: descriptions, a catalogue, and lossless conversion in memory."""
