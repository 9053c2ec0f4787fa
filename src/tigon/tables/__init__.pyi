# The public names of tigon.tables: the one place that declares them (see tigon/lazy.py).
from tigon.tables.formats import read as read
