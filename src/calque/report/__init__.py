"""Comparison of results: statistics, verdicts, tables, plots and pages."""
