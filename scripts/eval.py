"""Stock PLAID and the plugin on one collection, end to end: results.json and report.html.

    python scripts/eval.py --out results/pydocs
    python scripts/eval.py --dataset pydocs:5000 --out results/pydocs-5000
    python scripts/eval.py --dataset scifact --data ~/beir --nbits 1 2 4 --k 10 100 1000 --out results/scifact
    python scripts/eval.py --config configs/pydocs.json --out results/pydocs

A stopped run goes on where it was when the same command is given again. Flags change the configuration's values.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a JSON file that says the whole experiment (see configs/)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; reused when complete")
    parser.add_argument("--dataset", help="pydocs, a folder or archive, an ir_datasets id; :N after it takes "
                        "N of its passages (default: pydocs:2000)")  # fmt: skip
    parser.add_argument("--data", help="folder of collections that --dataset may name barely")
    parser.add_argument("--split", help="which judgments: test, dev, dl19, ... (default: auto)")
    parser.add_argument("--queries", type=int, help="only the first N judged queries")
    parser.add_argument("--checkpoint", help="splade-tiny, minilm-128, minilm-384, a folder, or a hub's name")
    parser.add_argument("--nbits", type=int, nargs="+", help="bits of a residual: one index for each")
    parser.add_argument("--k", type=int, nargs="+", help="results a query; other search parameters as stock sets them")
    parser.add_argument("--systems", nargs="+", help="plaid, tilemaxsim, tilemaxsim:mode=rerank, ...")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--no-latency", action="store_true", help="compare only")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: hide the GPUs of this machine")
    parser.add_argument("--cache", help="where indexes and encoded texts are kept (default: ~/.cache/plaid-tilemaxsim)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    from eval import pipeline, report
    from eval.experiment import Experiment, default_experiment
    from eval.systems import Knobs

    try:
        experiment = default_experiment() if args.config is None else Experiment.read(args.config)
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
        experiment = experiment.with_changes(**changes)
        results = pipeline.run(experiment, args.out, data=args.data, cache=args.cache, progress=not args.quiet)
    except ValueError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 2
    print(report.summary(results))
    print(f"\nreport: {args.out / 'report.html'}\nnumbers: {args.out / 'results.json'}")
    return 1 if results["verdict"]["same"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
