# The public names of tigon.rank.prompt: the one place that declares them (see tigon/lazy.py).
from tigon.rank.prompt.calibrate import Calibration as Calibration
from tigon.rank.prompt.distil import taught as taught
from tigon.rank.prompt.export import export_sglang as export_sglang
from tigon.rank.prompt.model import PromptRanker as PromptRanker
from tigon.rank.prompt.pack import PromptBatch as PromptBatch
from tigon.rank.prompt.pack import Request as Request
from tigon.rank.prompt.reading import Requests as Requests
from tigon.rank.prompt.reading import read as read
from tigon.rank.prompt.task import Task as Task
from tigon.rank.prompt.verbalise import Prompt as Prompt
