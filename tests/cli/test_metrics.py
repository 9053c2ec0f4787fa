"""What a run tells of its steps: nothing that the trainer logs is lost, at any intervals of logging and saving."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")
from rich.console import Console
from transformers import PrinterCallback, TrainingArguments

from tigon.cli import metrics as module
from tigon.cli import metrics_file
from tigon.cli.metrics import Metrics
from tigon.cli.tokens import collate, tokens_of
from tigon.cli.trainer import CheckpointedTrainer, StopOnSignal

STEPS = 7


class Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"loss": (self.weight * x).square().mean()}


class Rewarded(CheckpointedTrainer):
    """Gathers a metric at every step and logs its mean since the last log, as TRL's trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gathered = []

    def training_step(self, *args, **kwargs):
        self.gathered.append(float(self.state.global_step + 1))
        return super().training_step(*args, **kwargs)

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs["reward"] = sum(self.gathered) / len(self.gathered)
            self.gathered.clear()
        else:
            logs["eval_reward"] = 0.5
        super().log(logs, start_time)


def train(folder, log_every, save_every, evaluate, stop_at=None):
    said = io.StringIO()
    console = Console(file=said, width=300)
    metrics = Metrics(folder, console, True, True, unit="rows", further=("reward",))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, save_steps=save_every, use_cpu=True,
        logging_steps=log_every, eval_strategy="steps" if evaluate else "no", eval_steps=save_every, report_to=[],
        disable_tqdm=True, prediction_loss_only=True, label_names=["x"],
    )  # fmt: skip
    stop = StopOnSignal(True)
    rows = [{"x": torch.full((1,), float(i))} for i in range(20)]
    trainer = Rewarded(
        model=Slope(), args=arguments, train_dataset=rows, eval_dataset=rows[:2] if evaluate else None,
        callbacks=[stop, metrics], metrics=metrics, keep=2, count=lambda batch: len(batch["x"]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if stop_at is not None:
        step = trainer.training_step

        def signalled(*args, **kwargs):
            if trainer.state.global_step + 1 == stop_at:
                stop.signal = 2
            return step(*args, **kwargs)

        trainer.training_step = signalled
    trainer.train()
    return metrics, said.getvalue(), [json.loads(line) for line in metrics.file.read_text().splitlines()]


def tensorboard(folder, name):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in found.Scalars(name)} if name in found.Tags()["scalars"] else {}


@pytest.mark.parametrize(
    ("log_every", "save_every", "evaluate"),
    [
        (1, 1, True), (1, 2, False), (1, 2, True), (2, 2, False), (2, 3, True), (3, 2, False), (4, 50, False),
        (50, 4, True), (50, 50, False),
    ],
)  # fmt: skip
def test_every_log_reaches_the_screen_the_file_and_tensorboard(tmp_path, log_every, save_every, evaluate):
    metrics, said, rows = train(tmp_path, log_every, save_every, evaluate)
    logged = sorted({*range(log_every, STEPS + 1, log_every), STEPS})  # the last step is always logged
    # Each log has the mean of the steps since the log before.
    means = {step: (before + 1 + step) / 2 for before, step in zip([0, *logged], logged, strict=False)}
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert {row["step"]: row["reward"] for row in steps if "reward" in row} == means
    assert {row["step"] for row in steps if "grad_norm" in row} == set(logged)
    assert tensorboard(tmp_path, "reward") == means
    assert set(tensorboard(tmp_path, "loss")) == set(range(1, STEPS + 1))
    lines = said.splitlines()
    for step, mean in means.items():
        assert any(line.startswith(f"step {step}: loss") and f"reward {mean:.4f}" in line for line in lines), said
    assert metrics.last["reward"] == means[STEPS]
    assert metrics.last["step"] == STEPS
    evaluated = sorted({*range(save_every, STEPS + 1, save_every), STEPS}) if evaluate else []
    assert [row["step"] for row in rows if row.get("eval_reward") == 0.5 and "eval_loss" in row] == evaluated


def test_a_run_that_is_stopped_logs_its_last_step(tmp_path):
    _, _, rows = train(tmp_path, 50, 50, False, stop_at=3)
    assert [row.get("reward") for row in rows if "loss" in row] == [None, None, 2.0]


def test_speeds_count_tokens_and_no_padding(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 10.0))
    metrics = Metrics(tmp_path, Console(file=io.StringIO()), False, True)
    metrics.mean = metrics.total = lambda tensor: tensor
    metrics.mark = 6.0
    state, control = SimpleNamespace(global_step=1, epoch=0.5), SimpleNamespace(should_save=True, should_log=False)
    lengths = [5, 9, 2], [7, 7]
    for some in lengths:  # two micro-batches, of which the first is padded
        ids = [torch.arange(n) for n in some]
        batch = collate([{"input_ids": i, "labels": i} for i in ids], pad=0)
        metrics.add(torch.tensor(1.0), 1e-3, tokens_of(batch))
    metrics.on_step_end(None, state, control)
    row = json.loads(metrics.file.read_text())
    assert row["tokens_per_second"] == (5 + 9 + 2 + 7 + 7) / 4


def test_lines_that_no_run_wrote_are_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3}, {"step": 2, "loss": 1.5}, {"step": 2, "loss": 1.0}]
    wrong = [
        "5",
        "[]",
        "null",
        '{"loss": 1}',
        '{"step": "3", "loss": 1}',
        '{"step": 3, "loss": "1"}',
        "[" * 100_000,
        "{",
    ]
    lines = [*map(json.dumps, rows), *wrong]
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    assert metrics_file.read_metrics(file) == ({1: 2.0, 2: 1.0}, {1: 3.0})
    metrics_file.plot_loss(file, tmp_path / "loss.png", "loss")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"{}", b"{}\n"), (b"{}\n", b"{}\n"), (b"\xff", b"\xff\n")])
def test_a_line_that_a_kill_cut_off_is_ended(tmp_path, before, after):
    file = tmp_path / "metrics.jsonl"
    metrics_file.repair(file)
    assert not file.exists()
    file.write_bytes(before)
    metrics_file.repair(file)
    assert file.read_bytes() == after
