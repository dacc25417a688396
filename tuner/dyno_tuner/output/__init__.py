"""The output of a run: the profile, the closing table, progress, comparisons and the HTML page."""
