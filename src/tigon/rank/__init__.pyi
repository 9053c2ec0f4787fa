# The public names of tigon.rank: the one place that declares them (see tigon/lazy.py).
from tigon.rank import losses as losses
from tigon.rank import metrics as metrics
