# The public names of tigon.graph: the one place that declares them (see tigon/lazy.py).
from tigon.graph.angles import plot_angles as plot_angles
from tigon.graph.angles import principal_angles as principal_angles
from tigon.graph.citations import planetoid as planetoid
from tigon.graph.data import Graph as Graph
from tigon.graph.data import read_graph as read_graph
from tigon.graph.g2r import G2R as G2R
from tigon.graph.g2r import group_neighbors as group_neighbors
from tigon.graph.linear_probe import probe as probe
