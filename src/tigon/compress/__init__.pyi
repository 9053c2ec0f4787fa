# The public names of tigon.compress: the one place that declares them (see tigon/lazy.py).
from tigon.compress.compressor import feed_forward as feed_forward
from tigon.compress.embedding import embeddings as embeddings
from tigon.compress.layers import SplitLinear as SplitLinear
from tigon.compress.options import Bits as Bits
from tigon.compress.report import Report as Report
from tigon.compress.storage import dequantize as dequantize
from tigon.compress.storage import load as load
from tigon.compress.storage import save as save
