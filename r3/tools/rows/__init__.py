"""Rows of all sources but plain JSON: tables, folders, patterns, data sets of libraries."""
