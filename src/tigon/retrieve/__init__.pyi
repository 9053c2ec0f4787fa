# The public names of tigon.retrieve: the one place that declares them (see tigon/lazy.py).
from tigon.losses.over_items import item_softmax as item_softmax
from tigon.retrieve.batching import Batcher as Batcher
from tigon.retrieve.batching import Overloaded as Overloaded
from tigon.retrieve.calibrating import Calibration as Calibration
from tigon.retrieve.columns import Category as Category
from tigon.retrieve.columns import Tags as Tags
from tigon.retrieve.hits import Hits as Hits
from tigon.retrieve.index import Index as Index
from tigon.retrieve.memory import MemoryPlan as MemoryPlan
from tigon.retrieve.memory import plan_memory as plan_memory
from tigon.retrieve.ordered import Number as Number
from tigon.retrieve.ordered import Timestamp as Timestamp
from tigon.retrieve.schema import Schema as Schema
from tigon.retrieve.searching import Explanation as Explanation
from tigon.retrieve.text import parse as parse
from tigon.retrieve.where import Expression as Expression
from tigon.retrieve.where import col as col
