"""Lightning with Tigon: one callback, nothing else changes.

    python examples/lightning_module.py

A small Llama with random weights learns eight sentences, in seconds on a CPU. Needs pip install ".[train]" and
lightning.
"""

import lightning as L
import small_model
import torch

from tigon.integrations.lightning import TigonCallback


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model.model()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        if batch_idx % 5 == 4:
            print(f"step {batch_idx + 1:2d}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


tokenizer = small_model.tokenizer()
tokenizer.padding_side = "right"
texts = [prompt + answer for prompt, answer in zip(small_model.PROMPTS, small_model.ANSWERS, strict=True)]
batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

trainer = L.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[TigonCallback()],  # the one line
)  # fmt: skip
trainer.fit(LanguageModel(), torch.utils.data.DataLoader([batch] * 20, batch_size=None))
