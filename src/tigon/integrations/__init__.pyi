# The modules of tigon.integrations: the one place that declares them (see tigon/lazy.py).
from tigon.integrations import axolotl as axolotl
from tigon.integrations import capture as capture
from tigon.integrations import hub as hub
from tigon.integrations import liger as liger
from tigon.integrations import lightning as lightning
from tigon.integrations import packing as packing
from tigon.integrations import sam as sam
from tigon.integrations import sentence_transformers as sentence_transformers
from tigon.integrations import torchtitan as torchtitan
from tigon.integrations import trainer as trainer
from tigon.integrations import trl as trl
