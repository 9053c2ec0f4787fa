"""Filters: item columns, expressions over columns, and the tests on attribute words that expressions compile to."""
