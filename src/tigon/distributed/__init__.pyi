# The public names of tigon.distributed: the one place that declares them (see tigon/lazy.py).
from tigon.distributed import hpz as hpz
from tigon.distributed.hpz import apply_hpz as apply_hpz
from tigon.distributed.tp import tensor_parallel as tensor_parallel
from tigon.distributed.tp import tensor_parallel_plan as tensor_parallel_plan
from tigon.distributed.traffic import count_traffic as count_traffic
