"""Open a ranker from a run's folder, or from a folder written by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import RECORD
from tigon.cli.problem import Problem
from tigon.files import read_json
from tigon.rank.cli.fitting import MODEL
from tigon.rank.cli.seeds import one_of
from tigon.rank.cli.shared import after_own, history_of, paths_of, sentences

PROMPT, CONFIG = "prompt.yaml", "config.json"


class Opened:
    """A ranker, with the options to read and score tables.

    ranker: on the device. options: from `tigon rank fit`; {} without a run. objective: the training objective.
    """

    def __init__(self, command: str, folder: Path, device: Any) -> None:
        self.command, self.folder, self.device = command, folder, device
        self.options: dict[str, Any] = {}
        place = folder
        one_of(command, folder)
        if (folder / RECORD).is_file() and not (folder / PROMPT).is_file():
            self.options = _options(command, folder)
            place = folder / MODEL
            if not place.is_dir():
                raise Problem(
                    f"{command}: the run in {folder} is not at its end; go on with it by: tigon rank fit --resume "
                    f"--output {folder}"
                )
        self.by_prompt = (place / PROMPT).is_file()
        with sentences(command):
            if self.by_prompt:
                from tigon.rank.models.prompt import PromptRanker

                self.ranker: Any = PromptRanker.from_pretrained(place, device=device)
            elif (place / CONFIG).is_file():
                from tigon.rank import Ranker

                self.ranker = Ranker.from_pretrained(place, device=device)
            else:
                raise Problem(f"{command}: {folder} holds no ranker: it has neither {RECORD} nor {CONFIG}")
        self.objective = self.options.get("objective", "impressions")

    def read(self, data: list[str], history: list[str], items: list[str], users: list[str], *, labelled: bool) -> Any:
        """Read impressions with the ranker's schema. Missing arguments default to the run's.

        If the run's history was its own impressions, they are read as events, together with the data if it has labels.
        """
        from tigon.rank import Impressions

        data = paths_of(data)
        sides: dict[str, Any] = {name: paths_of(given) or self.options.get(name) or None
                 for name, given in (("items", items), ("users", users))}  # fmt: skip
        events = history_of(paths_of(history) or self.options.get("history", []))
        if not history:
            events = after_own(events, [path for path in self.options.get("data", []) if path not in data])
        with sentences(self.command):
            if self.by_prompt:
                from tigon.rank.models.prompt import read_impressions

                return read_impressions(self.ranker.prompt, data, history=events, labelled=labelled, **sides)
            return Impressions.read(data, history=events, schema=self.ranker.schema, labelled=labelled, **sides)

    @property
    def files(self) -> list[str]:
        """The run's training tables."""
        names = ("data", "history", "items", "users", "val", "test")
        return [path for name in names for path in self.options.get(name) or []]

    @property
    def labels(self) -> list[str]:
        """Names that `scored` reports: labels, or prompt tasks."""
        return list(self.ranker.prompt.tasks if self.by_prompt else self.ranker.labels)

    def check_binary(self, notes: list[str]) -> None:
        """Raise if no prompt task has answers 1 and 0, which metrics require; add a note for the other tasks."""
        if not self.by_prompt:
            return
        tasks = self.ranker.prompt.tasks
        others = [name for name, task in tasks.items() if set(task.values) != {0.0, 1.0}]
        said = "metrics are of two answers, of the values 1 and 0; a task whose label is a comparison, such as "
        said += "'rating >= 4', has them"
        if len(others) == len(tasks):
            raise Problem(f"{self.command}: none of the tasks {', '.join(others)} can be measured: {said}")
        if others:
            notes.append(f"{', '.join(others)}: left out, since {said}")

    def check_explorer(self) -> None:
        """Raise if the ranker does not support exploration."""
        if self.by_prompt:
            raise Problem(f"{self.command}: --explore is for rankers with a last layer of labels, got one by prompts")
        if self.ranker.explorer is None:
            raise Problem(
                f"{self.command}: --explore needs explorer.safetensors beside the ranker, which tigon rank fit leaves "
                "there by --loss bce, and rank.Explorer.fit(ranker, data) finds"
            )

    def scored(
        self, data: Any, batch_options: Any, *, explore: float = 0.0, seed: int = 0
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield `rank.Scores` and the output columns per label, piece by piece, in request order."""
        import torch

        from tigon.rank import Scores
        from tigon.rank.evaluation.score import score_batches
        from tigon.rank.models.explorer import sample_weights

        with sentences(self.command):
            if not self.by_prompt:
                sampler = sample_weights(self.ranker, explore, seed=seed) if explore else None
                for part in score_batches(self.ranker, data, batch_options, sampler=sampler):
                    yield part, {label: logits.sigmoid() for label, logits in part.logits.items()}
                return
            # The score is a probability only for answers with values 0 and 1; only those tasks have labels.
            p, tasks = self.ranker.score(data), self.ranker.prompt.tasks
            first = data.batch(torch.arange(len(data)), history_max=0)
            likely = {name: value for name, value in p.items() if set(tasks[name].values) == {0.0, 1.0}}
            labels = {name: y for name, y in first.labels.items() if name in likely}
            logits = {name: torch.logit(value.double(), eps=1e-12).float() for name, value in likely.items()}
            total = torch.stack(list(p.values())).sum(0)
            yield Scores(first.offsets, first.rows, logits, total, labels, first.weights), p


def _options(command: str, folder: Path) -> dict[str, Any]:
    record = read_json(folder / RECORD)
    options = record.get("options")
    if record.get("kind") != "rank fit" or not isinstance(options, dict):
        raise Problem(f"{command}: {folder / RECORD} is not the record of a run of tigon rank fit")
    return options
