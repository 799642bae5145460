"""The evaluation's command line: `plaid-tilemaxsim eval COMMAND`, and in a checkout `python scripts/eval.py`.

    build      encode the passages and build stock indexes
    retrieve   TREC runs and every score, of every system
    measure    effectiveness of these runs, with paired tests
    compare    rankings and scores against the first system's and the oracle's
    latency    load time, memory, latency by stage, throughput
    report     report.html and report.md from results.json
    run        all of them: results.json, report.html, report.md (what is done without a command)

Each command does what it needs of the earlier ones, and nothing that is already done. A stopped one goes on where it
was when it is given again.

    plaid-tilemaxsim eval run --config msmarco_k10 --out results/msmarco_k10
    plaid-tilemaxsim eval --dataset pydocs:5000 --out results/pydocs-5000
    plaid-tilemaxsim eval --dataset scifact --data ~/beir --nbits 1 2 4 --k 10 100 1000 --out results/scifact

--config takes a file or the name of a shipped one (any other name lists them); flags change its values.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

COMMANDS = ("build", "retrieve", "measure", "compare", "latency", "report", "run")
EXTRA = {"ir_measures": "ir_measures", "scipy": "scipy", "ir_datasets": "ir_datasets"}


def parse(argv: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="run", metavar="COMMAND")
    parser.add_argument("--config", help="a JSON file that says the whole experiment, or the name of one in configs/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; reused when complete")
    parser.add_argument("--dataset", help="pydocs, a folder or archive, an ir_datasets id; :N after it takes "
                        "N of its passages (default: pydocs:2000)")  # fmt: skip
    parser.add_argument("--data", help="folder of collections that --dataset may name barely")
    parser.add_argument("--split", help="which judgments: test, dev, dl19, ... (default: auto)")
    parser.add_argument("--queries", type=int, help="only the first N judged queries")
    parser.add_argument("--checkpoint", help="splade-tiny, minilm-128, minilm-384, a folder, or a hub's name")
    parser.add_argument("--nbits", type=int, nargs="+", help="bits of a residual: one index for each")
    parser.add_argument("--k", type=int, nargs="+", help="results a query; other search parameters as stock sets them")
    parser.add_argument("--systems", nargs="+", help="plaid, tilemaxsim, tilemaxsim:mode=rerank, fast-plaid, ...")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--no-latency", action="store_true", help="compare only")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: hide the GPUs of this machine")
    parser.add_argument("--cache", help="where indexes and encoded texts are kept (default: ~/.cache/plaid-tilemaxsim)")
    parser.add_argument("--kernels", type=Path, help="a result of scripts/bench_kernels.py: its roofline is reported")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """0, 1 when results differ from stock's that should not, 2 for what cannot be done."""
    args = parse(sys.argv[1:] if argv is None else argv, prog)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    if missing := [package for package, module in EXTRA.items() if importlib.util.find_spec(module) is None]:
        print(f"eval: expected {', '.join(missing)} to be installed: pip install 'plaid-tilemaxsim[eval]'",
              file=sys.stderr)  # fmt: skip
        return 2
    try:
        return _report(args) if args.command == "report" else _run(args)
    except ValueError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from . import pipeline, report

    stages = pipeline.STAGES if args.command == "run" else (args.command,)
    results = pipeline.run(
        experiment_of(args), args.out, stages=stages, data=args.data, cache=args.cache, kernels=args.kernels,
        progress=not args.quiet,
    )  # fmt: skip
    if args.command != "run":
        print(report.part(results, args.command))
        return 0
    print(report.summary(results))
    print(f"\nreport: {args.out / 'report.html'}\nnumbers: {args.out / 'results.json'}")
    return 1 if results["verdict"]["same"] is False else 0


def _report(args: argparse.Namespace) -> int:
    from . import markdown, report
    from .cache import read_json

    path = args.out / "results.json"
    if not path.exists():
        raise ValueError(f"{path}: expected the results of `run`, got none")
    results = read_json(path)
    if args.kernels is not None:
        results["kernels"] = read_json(args.kernels)
    report.write(results, args.out / "report.html")
    markdown.write(results, args.out / "report.md")
    print(f"report: {args.out / 'report.html'}")
    return 0


def experiment_of(args: argparse.Namespace) -> Any:
    """The experiment that the arguments ask for."""
    from .experiment import Experiment, default_experiment, find_config
    from .systems import Knobs

    experiment = default_experiment() if args.config is None else Experiment.read(find_config(args.config))
    names = ("dataset", "split", "queries", "checkpoint", "nbits", "systems", "threads")
    if args.dataset is not None:
        # the brackets of eval.datasets are wildcards to a shell
        args.dataset = re.sub(r":(\d+)$", r"[:\1]", args.dataset)
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.k is not None:
        changes["search"] = [Knobs.defaults(k) for k in args.k]
    if args.no_latency:
        changes["latency"] = replace(experiment.latency, queries=0)
    if args.config is None and args.dataset is not None:
        changes["name"] = args.dataset
    return experiment.with_changes(**changes)


if __name__ == "__main__":
    sys.exit(main())
