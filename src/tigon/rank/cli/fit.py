"""`tigon rank fit`: train a ranker on an impression table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tigon.cli.checkpoint import RECORD, write_json
from tigon.cli.folder import Claim
from tigon.cli.kept_runs import check_room, make_room, read_record
from tigon.cli.problem import Problem, count_processes, device_of, integers, needs, seeds_of
from tigon.cli.progress import working
from tigon.cli.screen import screen
from tigon.rank.cli.models import arguments_of, choose, read_blocks
from tigon.rank.cli.shared import digest, paths_of, sentences, weights_of, within
from tigon.rank.cli.streaming import streamed
from tigon.rank.cli.warm_start import WEIGHTS, adopt_model, find_ranker_folder, should_save_priors

NAME = "rank fit"
_RUN, _DATA, _MODEL, _STEP = "Run", "Data", "Model", "Optimization"
SPLITS = ("time", "request")


# ruff: noqa: E501 (one line for each option)
# fmt: off
def fit(
    data: Annotated[list[str] | None, within(_DATA, "Impressions, a row each: a file, several, or a folder: parquet, csv, JSON lines.")] = None,
    history: Annotated[list[str] | None, within(_DATA, "Events: user, item, time and what happened. self: the impressions themselves; positives: those with a positive label.")] = None,
    items: Annotated[list[str] | None, within(_DATA, "Features of items, a row each.")] = None,
    users: Annotated[list[str] | None, within(_DATA, "Features of users, a row each.")] = None,
    val: Annotated[list[str] | None, within(_DATA, "Impressions to validate on; default: a share of the data.")] = None,
    test: Annotated[list[str] | None, within(_DATA, "Impressions to test the ranker on at the end.")] = None,
    schema: Annotated[Path | None, within(_DATA, "A schema.json that you have edited; default: what is found in the data.")] = None,
    request: Annotated[str | None, within(_DATA, "Column of what was shown together; default: session_id, request_id, …, or user and time.")] = None,
    item: Annotated[str | None, within(_DATA, "Column of items; default: item_id, item, ….")] = None,
    user: Annotated[str | None, within(_DATA, "Column of users; default: user_id, user, ….")] = None,
    time: Annotated[str | None, within(_DATA, "Column of times; default: timestamp, time, ….")] = None,
    label: Annotated[list[str] | None, within(_DATA, "Column of 0 and 1, or a comparison, such as 'like=rating>=4'; once for each label. Default: click, label, ….")] = None,
    action: Annotated[list[str] | None, within(_DATA, "Column of the history that says what happened, once for each.")] = None,
    weight: Annotated[str | None, within(_DATA, "Column of how much a row counts; default: sample_weight.")] = None,
    output: Annotated[Path, within(_RUN, "Folder for checkpoints, the ranker and results.", "--output", "-o")] = Path("rank-run"),
    from_run: Annotated[Path | None, within(_RUN, "Folder of a run, or of a ranker, to go on from on newer data; new values get rows of their own.", "--from")] = None,
    resume: Annotated[bool, within(_RUN, "Resume from the latest complete checkpoint in --output, with its original options.", "--resume")] = False,
    overwrite: Annotated[bool, within(_RUN, "Delete the run that is in --output.", "--overwrite")] = False,
    save_priors: Annotated[bool | None, within(_RUN, "Save the Fisher information that a later --from run needs (twice the size of the ranker, one extra pass over the data); default: with bce and without row-adagrad.", "--save-priors/--no-save-priors")] = None,
    save_every: Annotated[int, within(_RUN, "Steps between checkpoints.", min=1)] = 500,
    log_every: Annotated[int, within(_RUN, "Steps between log lines.", min=1)] = 50,
    model: Annotated[str, within(_MODEL, "ligr, by the history of a user, or lirank, by the features of a row.")] = "ligr",
    width: Annotated[int | None, within(_MODEL, "Width of the tokens; of the embeddings of lirank. \\[default: from the data]", min=1)] = None,
    layers: Annotated[int | None, within(_MODEL, "Layers, the set-wise ones among them; cross layers of lirank. \\[default: from the data]", min=1)] = None,
    heads: Annotated[int | None, within(_MODEL, "ligr: heads of attention. \\[default: from the data]", min=1)] = None,
    setwise_layers: Annotated[int | None, within(_MODEL, "ligr: last layers in which the candidates of a request read each other; default: 1.", min=0)] = None,
    cross: Annotated[str | None, within(_MODEL, "lirank: cross layers, residual, dcn or none; default: residual.")] = None,
    rank: Annotated[int | None, within(_MODEL, "lirank: rank of the cross layers. \\[default: from the data]", min=1)] = None,
    mlp: Annotated[str | None, within(_MODEL, "lirank: widths of the layers beside them, separated by commas, or none. \\[default: from the data]")] = None,
    norm: Annotated[str | None, within(_MODEL, "lirank: of these layers, batch, layer or none; default: batch.")] = None,
    tower: Annotated[list[str] | None, within(_MODEL, "lirank: labels that share layers of their own, such as click=click,long_dwell, once for each tower; default: all are one.")] = None,
    tower_mlp: Annotated[str | None, within(_MODEL, "lirank: widths of the layers of each tower; default: none.")] = None,
    blocks: Annotated[Path | None, within(_MODEL, "lirank: a blocks.json of `tigon rank search`, in place of --cross, --layers, --rank and --mlp.")] = None,
    calibrate: Annotated[str | None, within(_MODEL, "lirank: an isotonic layer for each label (label), or for each value of a column, too; none. Fitted on the held-out rows at the end.")] = None,
    gate: Annotated[bool, within(_MODEL, "Whether layers are gated.", "--gate/--no-gate")] = True,
    dropout: Annotated[float, within(_MODEL, "Dropout.", min=0, max=0.9)] = 0.0,
    score_weight: Annotated[list[str] | None, within(_MODEL, "Weight of a label's probability in the score, such as click=1, once for each label; default: 1 each.")] = None,
    objective: Annotated[str, within(_STEP, "impressions, or next-item: what comes next in a history, among all items.")] = "impressions",
    loss: Annotated[str, within(_STEP, "bce, softmax, pairwise, approx_ndcg or lambda, summed over the labels.")] = "bce",
    label_weight: Annotated[list[str] | None, within(_STEP, "Weight of a label's loss, such as click=0.5, once for each label; default: 1 each.")] = None,
    lr: Annotated[float | None, within(_STEP, "Peak of the learning rate of AdamW. \\[default: from the data]")] = None,
    table_optimizer: Annotated[str, within(_STEP, "Of embeddings: adamw as of the rest, or row-adagrad, which touches the rows of a step alone (lirank).")] = "adamw",
    table_lr: Annotated[float, within(_STEP, "Peak of the learning rate of row-adagrad.")] = 0.02,
    weight_decay: Annotated[float, within(_STEP, "Decay of the weights of linear layers.")] = 0.01,
    warmup: Annotated[float, within(_STEP, "Fraction of steps used for learning-rate warm-up.")] = 0.05,
    schedule: Annotated[str, within(_STEP, "Learning-rate schedule: cosine, linear, constant, or plateau, which divides the rate by 10 after each evaluation that does not improve.")] = "cosine",
    clip: Annotated[float, within(_STEP, "Largest norm of the gradients; 0: any.")] = 1.0,
    prior_strength: Annotated[float, within(_STEP, "With --from: strength of the penalty that keeps parameters close to the previous run; n / m weighs the old data as n rows against m new ones.", min=0)] = 0.1,
    epochs: Annotated[int | None, within(_STEP, "Most passes over the requests. \\[default: from the data]", min=1)] = None,
    max_minutes: Annotated[float | None, within(_STEP, "Most minutes of training; default: any.")] = None,
    batch_size: Annotated[int | None, within(_STEP, "Requests of a step. \\[default: from the data]", min=1)] = None,
    batch_tokens: Annotated[int | None, within(_STEP, "Events and candidates of a step, instead of so many requests.", min=1)] = None,
    stream: Annotated[bool | None, within(_DATA, "Read the impressions by row groups of parquet files, or as a whole; default: by row groups where they would take half of the memory.", "--stream/--no-stream")] = None,
    stream_mib: Annotated[int, within(_DATA, "With --stream: most memory of the impressions, in MiB.", min=1)] = 1024,
    history_max: Annotated[int, within(_DATA, "Newest events of a request that are read.", min=0)] = 200,
    metric: Annotated[str | None, within(_STEP, "What early stopping looks at: auc, gauc, log_loss, ndcg@10, click:auc, …; default: auc for bce, else ndcg@10.")] = None,
    eval_every: Annotated[int | None, within(_STEP, "Steps between evaluations; 0: at the end of each epoch. \\[default: from the data]", min=0)] = None,
    patience: Annotated[int | None, within(_STEP, "Evaluations without a better one before the run stops. \\[default: from the data]", min=1)] = None,
    val_fraction: Annotated[float | None, within(_DATA, "Share of the requests that is held out, without --val; 0: train for --epochs. \\[default: from the data]", min=0, max=0.9)] = None,
    val_split: Annotated[str | None, within(_DATA, "Which requests are held out: the last by time, or any (request); default: by time where there are times.")] = None,
    at: Annotated[str, within(_RUN, "Cut-offs of NDCG and HR in the results, separated by commas.")] = "1,5,10",
    draws: Annotated[int, within(_RUN, "Bootstrap draws for the intervals of the results; 0: none.", min=0)] = 200,
    seed: Annotated[str, within(_STEP, "Seed of weights, order, dropout and the split; several, separated by commas: a run of each, with one split, and their mean and spread.")] = "0",
    precision: Annotated[str, within(_STEP, "Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, within(_RUN, "auto, cpu or cuda.")] = "auto",
) -> None:
    # fmt: on
    """Train and evaluate a ranker on a table of impressions.

    A row is an impression: the shown item, its request, and the outcome (labels).
    """
    given = {name: value for name, value in locals().items() if name not in ("resume", "overwrite", "device", "output")}
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors", "accelerate", "matplotlib")
    if count_processes() > 1:
        raise Problem(f"{NAME}: trains on one device, got {count_processes()} processes")
    output = output.expanduser().resolve()
    record: dict[str, Any] = {}
    if resume:
        record = read_record(NAME, output)
        if "results" in record:
            raise Problem(f"{NAME}: the run in {output} is at its end")
        given = record["options"]
    else:
        if not data:
            raise Problem(f"{NAME}: --data must name the impressions to train on")
        if from_run is not None:
            place_of = find_ranker_folder(from_run, output)
            adopt_model(given, place_of)
            given["from_run"] = str(place_of)
        check_room(NAME, output, overwrite)
        for name in ("data", "history", "items", "users", "val", "test"):
            given[name] = paths_of(given[name] or [])
        given["blocks"] = None if blocks is None else read_blocks(NAME, blocks.expanduser())
        given["schema"] = None if schema is None else str(schema.expanduser().resolve())
        given["stream"] = streamed(given)  # so that a resumed run reads them the same way
    place = device_of(device, NAME)
    seeds = seeds_of(NAME, str(given["seed"]))
    given["seed"] = seeds[0] if len(seeds) == 1 else ",".join(map(str, seeds))
    options = _options({**given, "seed": seeds[0]})
    integers(NAME, "--at", given["at"])
    from tigon.rank.cli.fitting import WRITTEN, Run, read_tables
    from tigon.rank.cli.seeds import Runs, folders_of

    with working(screen(stderr=True, soft_wrap=True), f"reading {', '.join(given['data'])}"):
        tables = read_tables(NAME, {**given, "seed": seeds[0]})
    files = [path for name in ("data", "history", "items", "users", "val", "test") for path in given[name]]
    if given.get("from_run"):
        files.append(str(Path(given["from_run"], WEIGHTS)))
    found = digest([path for path in files if Path(path).exists()])
    if resume and record["data"] != found:
        raise Problem(f"{NAME}: the data, or the ranker of --from, is not what the run in {output} was trained on")
    if not resume:
        chosen = choose(given, tables.train)
        options = _options({**given, "seed": seeds[0]})
        record = {"kind": NAME, "options": given, "chosen": chosen, "data": found}
    run: Run | Runs
    if len(seeds) == 1:
        run = Run(output, record, tables, options, place)
    else:
        run = Runs(output, record, tables, options, place, seeds)
    output.mkdir(parents=True, exist_ok=True)
    with Claim() as claim:
        claim.take(output)
        if not resume:
            make_room(NAME, output, (*WRITTEN, *(folder.name for folder in folders_of(output).values())), overwrite)
            write_json(output / RECORD, record)
        run.go()


def _options(given: dict[str, Any]) -> Any:
    from tigon.rank import FitOptions

    arguments_of(NAME, given)
    if given["val_split"] not in (None, *SPLITS):
        raise Problem(f"{NAME}: --val-split must be one of {', '.join(SPLITS)}, got {given['val_split']}")
    if given["model"] == "lirank" and given["history"]:
        raise Problem(f"{NAME}: --history is for --model ligr; lirank reads the features of rows alone")
    names = {field.name for field in dataclasses.fields(FitOptions)}
    chosen = {name: value for name, value in given.items() if name in names}
    chosen["label_weights"] = weights_of(NAME, "--label-weight", given["label_weight"] or [])
    with sentences(NAME):
        options = FitOptions(**chosen)
    should_save_priors(given.get("save_priors"), options)
    return options
