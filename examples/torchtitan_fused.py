"""torchtitan with Tigon: a configuration of its registry, changed in two lines.

    cd examples; torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_fused --config llama3_8b_fused

Everything else is torchtitan's own Llama 3 8B, and its options on the command line work as before.
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel

from tigon.integrations.torchtitan import FuseConverter, LinearCrossEntropyLoss


def llama3_8b_fused():
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[FuseConverter.Config()])
    config.loss = LinearCrossEntropyLoss.Config(loss_fn=config.loss.loss_fn)
    return config


def llama3_debugmodel_fused():
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=[FuseConverter.Config()])
    config.loss = LinearCrossEntropyLoss.Config(loss_fn=config.loss.loss_fn)
    return config
