"""Work over many processes: launching them, scans over documents, conversion over files."""
