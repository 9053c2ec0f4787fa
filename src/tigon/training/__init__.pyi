# The public names of tigon.training: the one place that declares them (see tigon/lazy.py).
from tigon.training import hpz as hpz
from tigon.training.capture import graph_step as graph_step
from tigon.training.hpz import apply_hpz as apply_hpz
from tigon.training.micro_batch_sam import MicroBatchSAM as MicroBatchSAM
from tigon.training.row_adagrad import RowAdagrad as RowAdagrad
from tigon.training.tp import tensor_parallel as tensor_parallel
from tigon.training.tp import tensor_parallel_plan as tensor_parallel_plan
from tigon.training.traffic import count_traffic as count_traffic
