# The public names of tigon.data: the one place that declares them (see tigon/lazy.py).
from tigon.data import metrics as metrics
from tigon.data.formats import read as read
