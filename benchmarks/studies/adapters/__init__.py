"""Training steps with LoRA and QLoRA: HF with PEFT, Liger, Unsloth and Tigon."""
