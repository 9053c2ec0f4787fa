# The public names of tigon.rank.models.prompt: the one place that declares them (see tigon/lazy.py).
from tigon.rank.models.prompt.calibrate import calibrate as calibrate
from tigon.rank.models.prompt.calibration import Calibration as Calibration
from tigon.rank.models.prompt.distillation import add_teacher_scores as add_teacher_scores
from tigon.rank.models.prompt.export import export_sglang as export_sglang
from tigon.rank.models.prompt.model import PromptRanker as PromptRanker
from tigon.rank.models.prompt.packing import PromptBatch as PromptBatch
from tigon.rank.models.prompt.packing import Request as Request
from tigon.rank.models.prompt.requests import Requests as Requests
from tigon.rank.models.prompt.requests import read_impressions as read_impressions
from tigon.rank.models.prompt.task import Task as Task
from tigon.rank.models.prompt.templates import Prompt as Prompt
