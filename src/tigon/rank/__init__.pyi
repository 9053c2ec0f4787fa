# The public names of tigon.rank: the one place that declares them (see tigon/lazy.py).
from tigon.rank import losses as losses
from tigon.rank import metrics as metrics
from tigon.rank.batch import Batch as Batch
from tigon.rank.fields import Id as Id
from tigon.rank.fields import Ids as Ids
from tigon.rank.fields import Number as Number
from tigon.rank.fields import Text as Text
from tigon.rank.fields import Time as Time
from tigon.rank.impressions import Impressions as Impressions
from tigon.rank.ragged import Ragged as Ragged
from tigon.rank.schema import Roles as Roles
from tigon.rank.schema import Schema as Schema
