"""The command line: `python -m gradinv chapters | run | claims | audit | fetch | train`."""

import argparse
import contextlib
import os
import pathlib
import sys

from gradinv import claims, data
from gradinv.client import expect_one_of


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 where a chapter failed, 2 for a wrong argument, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options) or 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; finished chapters are kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gradinv", description="Gradient Inversion, Reproduced")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("chapters", help="what there is, and how long each takes")
    listing.set_defaults(command=_chapters)

    run = commands.add_parser("run", help="execute chapters")
    run.add_argument("chapters", nargs="*", metavar="CHAPTER", help="all of them if none is named")
    run.add_argument("--scale", default="laptop", help="smoke, laptop or full (default: laptop)")
    run.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--out", type=pathlib.Path, help="folder for notebooks and results (default: _build/runs)")
    run.add_argument("--budget", type=float, metavar="SECONDS", help="stop before this many seconds are over")
    run.add_argument("--write", action="store_true", help="put the outputs into notebooks/ and book/results/ too")
    run.set_defaults(command=_run)

    ledger = commands.add_parser("claims", help="the ledger as a table")
    ledger.add_argument(
        "--results",
        type=pathlib.Path,
        action="append",
        metavar="DIR",
        help="run records to read besides the committed ones",
    )
    ledger.set_defaults(command=_claims)

    audit = commands.add_parser("audit", help="the rank analysis of a network of your own, and the attacks that apply")
    audit.add_argument("model", metavar="MODULE:FACTORY", help="what gives the network, as torchvision.models:resnet18")
    audit.add_argument("--input", required=True, metavar="3x32x32", help="the size of one picture, or of one vector")
    audit.add_argument("--format", default="table", help="table, json or html (default: table)")
    audit.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write there instead of printing")
    audit.set_defaults(command=_audit)

    fetch = commands.add_parser("fetch", help="download a data set once")
    fetch.add_argument("name", help=", ".join(data.FETCHABLE))
    fetch.set_defaults(command=lambda options: print(data.fetch(options.name)))

    train = commands.add_parser("train", help="remake a small set of trained weights, or a record of private training")
    train.add_argument(
        "name", help="fc, resnet18-w16, or another recipe of gradinv/train.py; dp-eps8 or another budget"
    )
    train.set_defaults(command=_train)
    return parser


def _chapters(options) -> None:
    from gradinv import chapters

    for chapter in chapters.names():
        records = {scale: chapters.last(chapter, scale) for scale in claims.SCALES}
        took = ", ".join(
            f"{scale} {record['seconds'] / 60:.1f} min on {record['device_name']}"
            for scale, record in records.items()
            if record
        )
        print(f"{chapter:24}{chapters.title(chapter)}\n{'':24}{took or 'not run yet'}")


def _run(options) -> int:
    from gradinv import chapters

    try:
        chapters.run(
            options.chapters,
            scale=options.scale,
            device=options.device,
            seed=options.seed,
            out=options.out or chapters.RUNS,
            budget=options.budget,
            write=options.write,
        )
    except chapters.ChapterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _claims(options) -> None:
    runs = {
        (run["chapter"], run["scale"]): run
        for folder in (claims.RESULTS, *(options.results or ()))
        for run in claims.results(folder)
    }
    print(claims.overview(list(runs.values())).to_string(index=False))


def _audit(options) -> None:
    from gradinv.audit import audit, formats, input_shape, load

    expect_one_of("format", options.format, tuple(formats.FORMATS))
    shape = input_shape(options.input)
    with contextlib.redirect_stdout(sys.stderr):  # what the network prints stays out of the report
        found = audit(load(options.model), shape, options.model)
    text = formats.FORMATS[options.format](found)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def _train(options) -> None:
    from gradinv import private_train, train

    private = options.name in private_train.PRIVATE_BUDGETS
    print(private_train.train_privately(options.name) if private else train.train(options.name))


if __name__ == "__main__":
    sys.exit(main())
