"""verl with Tigon: an FSDP engine whose model is fused when it is built.

    PYTHONPATH=examples VERL_ENGINE_VENDOR=tigon python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.external_lib=verl_engine …

verl imports this module in each worker, and picks the engine by its "vendor"; all else finds verl's own. Norms, MLPs
and rotary embeddings run fused. The losses stay verl's, with logits or, by model.use_fused_kernels, without. Needs pip
install verl; `_build_module` is no documented method, and this was written for verl 0.9.
"""

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import tigon


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="tigon")
class FusedEngine(FSDPEngineWithLMHead):
    def _build_module(self):
        module = super()._build_module()  # with verl's own patches, without adapters and sharding
        tigon.fuse(module, parts=tigon.PARTS - {"head"})
        return module
