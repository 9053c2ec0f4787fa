"""A ranker from a run's folder, or from a folder written by `save_pretrained`, and the options to score with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import device_option, option
from tigon.cli.problem import Problem, check_choice
from tigon.cli.run import RECORD
from tigon.files import read_json
from tigon.rank.cli.report import sentences
from tigon.rank.cli.tables import FILES, add_own_history, parse_history, resolve_paths
from tigon.rank.cli.warm_start import CONFIG, MODEL, check_single

PROMPT = "prompt.yaml"


@dataclass(frozen=True, kw_only=True)
class SideOptions:
    """Tables beside the impressions."""

    history: list[str] | None = option(None, "Event tables; default: the run's event tables.")
    items: list[str] | None = option(None, "Item features; default: the run's item features.")
    users: list[str] | None = option(None, "User features; default: the run's user features.")


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """How a ranker scores batches of requests."""

    batch_size: int = option(256, "Requests of a batch.", min=1)
    precision: str = option("auto", "Dtype for matrix products: bf16, fp32, or auto (bf16 on a GPU).")
    device: str = device_option()


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(ScoringOptions):
    history_max: int | None = option(
        None, "Maximum events per request, the newest kept; default: the run's limit.", min=0
    )


class RankerFolder:
    """A ranker, with the options to read and score tables.

    ranker: on the device. options: from `tigon rank fit`; {} without a run. objective: the training objective.
    """

    def __init__(self, command: str, folder: Path, device: Any) -> None:
        self.command, self.folder, self.device = command, folder, device
        self.options: dict[str, Any] = {}
        place = folder
        check_single(command, folder)
        if (folder / RECORD).is_file() and not (folder / PROMPT).is_file():
            record = read_json(folder / RECORD)
            self.options = record.get("options")
            if record.get("kind") != "rank fit" or not isinstance(self.options, dict):
                raise Problem(f"{command}: {folder / RECORD} was not written by tigon rank fit")
            place = folder / MODEL
            if not place.is_dir():
                raise Problem(
                    f"{command}: the run in {folder} is incomplete; resume with: tigon rank fit --resume "
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
                raise Problem(f"{command}: {folder} holds no ranker: the folder has neither {RECORD} nor {CONFIG}")
        self.objective = self.options.get("objective", "impressions")

    def read(self, data: list[str], sides: SideOptions | None = None, *, labelled: bool) -> Any:
        """Read impressions with the ranker's schema. Missing tables default to the run's.

        If the run's history was its own impressions, they are read as events, together with the data if it has labels.
        """
        from tigon.rank import Impressions

        data, sides = resolve_paths(data), sides or SideOptions()
        given: dict[str, Any] = {
            name: resolve_paths(getattr(sides, name)) or self.options.get(name) or None for name in ("items", "users")
        }
        events = parse_history(resolve_paths(sides.history) or self.options.get("history") or [])
        if not sides.history:
            events = add_own_history(events, [path for path in self.options.get("data", []) if path not in data])
        with sentences(self.command):
            if self.by_prompt:
                from tigon.rank.models.prompt import read_impressions

                return read_impressions(self.ranker.prompt, data, history=events, labelled=labelled, **given)
            return Impressions.read(data, history=events, schema=self.ranker.schema, labelled=labelled, **given)

    @property
    def files(self) -> list[str]:
        """The run's training tables."""
        return [path for name in FILES for path in self.options.get(name) or []]

    @property
    def labels(self) -> list[str]:
        """Names that `score` reports: labels, or prompt tasks."""
        return list(self.ranker.prompt.tasks if self.by_prompt else self.ranker.labels)

    def make_batch_options(self, options: ScoringOptions) -> Any:
        """`rank.BatchOptions` from a command's options. The history length defaults to the training run's."""
        from tigon.rank.data.batches import PRECISIONS, BatchOptions

        check_choice(self.command, options, precision=PRECISIONS)
        longest = getattr(options, "history_max", None)
        longest = self.options.get("history_max") if longest is None else longest
        return BatchOptions(options.batch_size, None, longest, options.precision)

    def check_binary(self, notes: list[str]) -> None:
        """Raise if no prompt task has answers 1 and 0, which metrics require; add a note for the other tasks."""
        if not self.by_prompt:
            return
        tasks = self.ranker.prompt.tasks
        others = [name for name, task in tasks.items() if set(task.values) != {0.0, 1.0}]
        said = "metrics need two answers with values 1 and 0, as in a task whose label is a comparison, such as "
        said += "'rating >= 4'"
        if len(others) == len(tasks):
            raise Problem(f"{self.command}: none of the tasks {', '.join(others)} can be measured: {said}")
        if others:
            notes.append(f"{', '.join(others)}: left out, since {said}")

    def check_explorer(self) -> None:
        """Raise if the ranker does not support exploration."""
        if self.by_prompt:
            raise Problem(f"{self.command}: --explore needs a ranker with a last layer per label, got a prompt ranker")
        if self.ranker.explorer is None:
            raise Problem(
                f"{self.command}: --explore needs explorer.safetensors beside the ranker; tigon rank fit --loss bce "
                "writes this file, rank.Explorer.fit(ranker, data) fits an explorer"
            )

    def score(
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
