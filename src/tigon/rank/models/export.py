"""Export rankers as `torch.export` programs, which run without Tigon."""

from __future__ import annotations

from pathlib import Path

from tigon.rank.models.ligr.export import export_ligr
from tigon.rank.models.ligr.model import LiGR
from tigon.rank.models.lirank.export import export_lirank
from tigon.rank.models.lirank.model import LiRank
from tigon.rank.models.ranker import Ranker


def export(ranker: Ranker, folder: str | Path) -> list[Path]:
    """Export a ranker as `torch.export` programs: encode.pt2 and score.pt2 for LiGR, score.pt2 for LiRank.

    `tigon.rank.models.ligr.export` and `tigon.rank.models.lirank.export` describe the inputs and outputs.

    Args:
        ranker: `rank.LiGR` or `rank.LiRank`.
        folder: created if missing.
    Returns: the files.
    Raises: ValueError for another ranker, and for a folder that is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"rank.export: folder must be a folder, got the file {folder}.")
    if not isinstance(ranker, (LiGR, LiRank)):
        raise ValueError(f"rank.export: ranker must be a LiGR or a LiRank, got a {type(ranker).__name__}.")
    folder.mkdir(parents=True, exist_ok=True)
    return export_ligr(ranker, folder) if isinstance(ranker, LiGR) else export_lirank(ranker, folder)
