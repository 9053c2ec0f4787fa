"""LLaMA-Factory with Tigon: its own training function, with a callback.

    python examples/llama_factory_train.py qwen3_lora_sft.yaml          in place of: llamafactory-cli train …
    torchrun --nproc-per-node 4 examples/llama_factory_train.py qwen3_lora_sft.yaml

The YAML file is LLaMA-Factory's, without enable_liger_kernel and use_unsloth. Needs pip install llamafactory.
"""

from llamafactory.train.tuner import run_exp

from tigon.integrations.trainer import TigonCallback

if __name__ == "__main__":
    run_exp(callbacks=[TigonCallback()])
