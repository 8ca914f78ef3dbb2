"""Reports: lines into tables."""
