"""The data of `tigon train --task rank`: a prompt, and tables of impressions that are read when the run begins."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.options import TrainOptions
from tigon.cli.problem import Problem, one_line
from tigon.rank.models.prompt.templates import FILE, Prompt

if TYPE_CHECKING:
    from tigon.rank.models.prompt.requests import Requests


class Shown:
    """What requests showed, in the place of a corpus of texts.

    Args:
        options: of the run. data: the table, of --data or --eval-data.
        option: which of the two, for errors.
    Raises: Problem for a prompt that cannot be read.
    """

    texts: tuple[str, ...] = ()
    rows = True  # of a task, as those of TRL's trainers are
    chats = False

    def __init__(self, options: TrainOptions, data: str, option: str = "--data") -> None:
        self.options, self.name, self.option, self.chosen = options, data, option, ""
        try:
            self.prompt = Prompt.load(str(options.prompt))
        except (ValueError, OSError) as error:
            raise Problem(f"--prompt {options.prompt}: {one_line(error)}") from error
        if options.teacher and not (Path(options.teacher) / FILE).is_file():
            raise Problem(f"--teacher {options.teacher}: the folder of a ranker must hold {FILE}")

    @cached_property
    def requests(self) -> Requests:
        from tigon.cli.rank_task import requests_of

        return requests_of(self.options, self.prompt, self.name, self.option)

    @property
    def strings(self) -> list[str]:
        """The texts that a tokenizer is trained on."""
        from tigon.cli.rank_task import spoken

        return spoken(self)

    @property
    def characters(self) -> int:
        """Of the data, whose size all processes have to agree on: its rows."""
        return self.requests.data.rows

    def settle(self, given: set[str], source: Any) -> None:
        """Choose the options of the run that are not among `given` by the table, as `rank.defaults` has it."""
        from tigon.rank.training.defaults import choose_prompt_settings

        rows, text = self.requests.data.rows, source.config.get_text_config()
        found = choose_prompt_settings(len(self.requests), rows, text.hidden_size, source.weights)
        without = {"epochs"} if "steps" in given else set()
        without |= {"eval_fraction"} if "eval_data" in given else set()
        found = {name: value for name, value in found.items() if name not in given | without}
        for name, value in found.items():
            setattr(self.options, name, value)
        words = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in found.items())
        self.chosen = f"chosen from {rows:,} rows: {words}; options of these names override them" if found else ""

    def tokenize(self, tokenizer: Any, options: TrainOptions, source: Any) -> Any:
        from tigon.cli.rank_task import rows_of

        return rows_of(self, tokenizer, options, source)
