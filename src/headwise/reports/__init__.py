"""Reports of scans and studies: offline HTML pages and terminal output."""
