"""Methods side by side under one lag, one rate and one seed: whole runs of the product, their results, and tables."""
