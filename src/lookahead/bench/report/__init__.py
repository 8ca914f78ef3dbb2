"""Reports: lines into tables, plots and a page."""
