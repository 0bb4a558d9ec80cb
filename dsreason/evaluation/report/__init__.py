"""Results on disk, and what is made of them: scores, comparisons, tables and the HTML report."""
