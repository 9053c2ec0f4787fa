"""Filters: the columns of items, expressions over columns, and the tests of attribute words that they become."""
