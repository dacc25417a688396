"""The output of a run: the profile, the final table, progress, comparisons and the HTML page."""
