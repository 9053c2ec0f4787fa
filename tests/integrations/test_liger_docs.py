"""docs/how-to/from-liger.md: its tables are those of the code.

`python tests/integrations/test_liger_docs.py` writes the tables into the page.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tigon.integrations import liger
from tigon.integrations.liger import models

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-liger.md"
HEADINGS = {
    "models": "Models",
    "auto": "",
    "modules": "Norms and other modules",
    "functional": "Functions",
    "cross_entropy": "Cross entropy of a language model",
    "divergences": "Divergences",
    "chunked_loss": "Losses of logits and of heads",
}


def first_sentence(value) -> str:
    paragraph = inspect.getdoc(value).split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0].replace("|", "\\|")


def names() -> str:
    lines = []
    for module, heading in HEADINGS.items():
        if heading:
            lines += ["", f"### {heading}", "", "| name | what it is here |", "| :-- | :-- |"]
        for name in liger._NAMES[module].split():
            if name.isupper():
                lines.append(f"| `{name}` | The function of each type of model, as a dictionary. |")
            else:
                lines.append(f"| `{name}` | {first_sentence(getattr(liger, name))} |")
        if module == "models":
            lines.append(f"| `apply_liger_kernel_to_*`, {len(models.ARGUMENTS)} families | `tigon.fuse(model)`. |")
        if module == "chunked_loss":
            functions = sorted(n for n in vars(liger.chunked_loss) if n.startswith("liger_") and n not in liger._HOME)
            functions.append("liger_fused_linear_jsd")
            lines += [f"| `chunked_loss.{n}` | {first_sentence(getattr(liger.chunked_loss, n))} |" for n in functions]
    lines += ["", "### Not here", "", "| name | why, or what instead |", "| :-- | :-- |"]
    missing = {**liger.MISSING, "Liger…OutputWithPast": "a fused model keeps its output class"}
    lines += [f"| `{name}` | {reason[0].upper()}{reason[1:]}. |" for name, reason in missing.items()]
    return "\n".join(lines[1:])


def flags() -> str:
    lines = ["| Liger's flag | `tigon.fuse` |", "| :-- | :-- |"]
    for flag, parts in models.FLAGS.items():
        lines.append(f"| `{flag}` | {', '.join(f'`{part}`' for part in parts)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with its tables."""
    for marker, table in (("flags", flags()), ("names", names())):
        start, end = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
        page = re.sub(rf"{start}(.*{end})?", lambda _, t=f"{start}\n\n{table}\n\n{end}": t, page, flags=re.S)
    return page


def test_the_tables_are_those_of_the_code():
    page = PAGE.read_text()
    assert page == written(page), f"python {Path(__file__).relative_to(PAGE.parents[2])} writes the tables"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
