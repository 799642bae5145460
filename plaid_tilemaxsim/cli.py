"""The command line, ``plaid-tilemaxsim``: every command of COMMANDS."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

from plaid_tilemaxsim import __version__
from plaid_tilemaxsim.serve_requests import Limits


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status, 2 for what cannot be done, with a line on stderr that says why;
    ``run`` leaves as the program that it runs leaves."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["eval"]:  # it has a parser of its own
        return _eval(words[1:])
    args = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    if command is _run:  # the program's errors are its own
        return command(args)
    try:
        return command(args)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        print(f"plaid-tilemaxsim: {error}", file=sys.stderr)
        return 2


# Every command by what it is for, with an example and what it does, as `--help` shows them.
COMMANDS = {
    "search": {
        "run": ("run -- search.py", "run an unmodified Python program with the plugin enabled"),
        "serve": ("serve my.index --collection collection.tsv", "answer searches over HTTP, in batches"),
    },
    "an index": {
        "inspect": ("inspect my.index", "check a PLAID index, and say what it holds and where it would fit"),
        "warmup": ("warmup my.index --k 10,100", "compile what searching an index needs, into Triton's cache on disk"),
        "pq": ("pq my.index --m 16", "train a product quantiser on an index, for the scorer option codec"),
        "shard": ("shard my.index --n 4", "cut an index into shards, stock indexes of their own, for several machines"),
        "plan": (
            "plan --passages 138364198 --avg-len 68",
            "memory, GPUs and expected times of a collection, from the published measurements",
        ),
    },
    "measure": {
        "eval": ("eval --dataset pydocs:2000 --out results", "index, search, measure and compare with stock PLAID"),
        "tune": ("tune --out tuning.json", "measure block choices on this GPU, into a file for the option `tuning`"),
        "env": ("env", "versions, devices and what they mean for the plugin: for bug reports"),
    },
}


def _parser() -> argparse.ArgumentParser:
    lines = ["ColBERTv2/PLAID search scored by fused GPU kernels, as a plugin for colbert-ai."]
    for group, members in COMMANDS.items():
        lines += ["", f"{group}:"]
        for name, (example, text) in members.items():
            lines += [f"  {name:<9} {text}", f"            plaid-tilemaxsim {example}"]
    parser = argparse.ArgumentParser(
        prog="plaid-tilemaxsim",
        usage="plaid-tilemaxsim COMMAND ...",
        description="\n".join(lines),
        epilog="`plaid-tilemaxsim COMMAND --help` has the options of a command. In Python: plaid_tilemaxsim.enable(),\n"
        'then ColBERTConfig(scorer="tilemaxsim").',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    examples = {name: example for members in COMMANDS.values() for name, (example, _) in members.items()}
    parser.add_argument(
        "--version", action="version", version=f"plaid-tilemaxsim {__version__}", help=argparse.SUPPRESS
    )
    parsers = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS)

    def add_parser(name: str, **options: Any) -> argparse.ArgumentParser:
        options.setdefault("epilog", f"example: plaid-tilemaxsim {examples[name]}")
        return parsers.add_parser(name, prog=f"plaid-tilemaxsim {name}", **options)

    run = add_parser(
        "run",
        usage="plaid-tilemaxsim run [--scorer NAME] [--scorer-options JSON] [--] (SCRIPT.py | -m MODULE) [ARG ...]",
        description="Runs a program as `python SCRIPT.py ARG ...` or `python -m MODULE ARG ...` would, with "
        "plaid_tilemaxsim enabled. A config that names a scorer itself is left alone.",
    )
    run.add_argument("--scorer", default="tilemaxsim", help="scorer of configs that name none (default: %(default)s)")
    run.add_argument(
        "--scorer-options",
        type=_json_object,
        metavar="JSON",
        help="""their scorer_options, for example '{"mode": "exhaustive"}'""",
    )
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(command=_run, usage_error=run.error)

    inspect = add_parser("inspect")
    inspect.add_argument("index", metavar="INDEX", help="folder of the index")
    inspect.add_argument(
        "--verify",
        choices=("full", "structure"),
        default="full",
        help="full (the default): every byte is read and lists are compared with codes, minutes for 100 million "
        "tokens and more; structure: small files and all sizes, a second",
    )
    inspect.set_defaults(command=_inspect)

    warmup = add_parser(
        "warmup",
        description="A search compiles the kernels it needs when it first needs them. This does so beforehand, for "
        "all processes that share the cache (TRITON_CACHE_DIR), and reports the time of a search afterwards.",
    )
    warmup.add_argument("index", metavar="INDEX", help="folder of the index")
    warmup.add_argument("--k", type=_counts, default=[10, 100, 1000], help="results, as in 10,100,1000 (the default)")
    warmup.add_argument("--query-maxlen", type=int, default=32, help="query tokens (default: %(default)s)")
    warmup.add_argument("--scorer-options", type=_json_object, metavar="JSON", help="as in ColBERTConfig")
    warmup.set_defaults(command=_warmup)

    pq = add_parser(
        "pq",
        description="Trains on a sample of the index's embeddings, encodes all of them and writes a sidecar beside the "
        """index's own files, which stay as they are. Used where asked for: scorer_options={"codec": "pq"}.""",
    )
    pq.add_argument("index", metavar="INDEX", help="folder of the index")
    pq.add_argument("--m", type=int, default=16, help="bytes a token: 8, 16, 32 or 64 (default: %(default)s)")
    pq.add_argument("--opq", action="store_true", help="turn the embeddings first (OPQ): better, and slower to train")
    pq.add_argument("--sample", type=int, default=1 << 16, help="tokens to train on (default: %(default)s)")
    pq.add_argument("--seed", type=int, default=0, help="of the sample and of k-means (default: %(default)s)")
    pq.add_argument("--force", action="store_true", help="replace a sidecar that is in order")
    pq.set_defaults(command=_pq)

    shard = add_parser(
        "shard",
        description="Writes shards of contiguous passages with about equally many tokens, and a manifest that "
        "plaid_tilemaxsim.cluster opens. Run again after an interruption, it goes on after the last complete shard.",
    )
    shard.add_argument("index", metavar="INDEX", help="folder of the index, which stays as it is")
    shard.add_argument("--n", type=int, required=True, help="shards")
    shard.add_argument("--out", metavar="DIR", help="folder for them (default: INDEX.shards)")
    shard.set_defaults(command=_shard)

    plan = add_parser(
        "plan",
        description="Memory by part, how many GPUs hold it, and expected latency and throughput of every mode, as sums "
        "of measured pieces: 32 query tokens, 128 dimensions, lengths spread as in MS MARCO. Needs neither a GPU nor "
        "an index.",
    )
    plan.add_argument("--passages", type=int, required=True)
    plan.add_argument("--avg-len", type=float, required=True, help="tokens a passage")
    plan.add_argument("--nbits", type=int, default=2, help="bits a dimension: 1, 2 or 4 (default: %(default)s)")
    plan.add_argument("--gpu", default="h200", help="default: %(default)s, the only one that was measured")
    plan.add_argument("--placement", default="gpu", help="of residuals and lists: gpu (default) or host")
    plan.add_argument("--centroids", type=int, help="default: as many as colbert-ai takes")
    plan.add_argument("--shards", type=int, help="default: as few as fit")
    plan.add_argument("--gpus-per-machine", type=int, default=8, help="default: %(default)s")
    plan.set_defaults(command=_plan)

    tune = add_parser(
        "tune",
        description="Tries other block choices for every kernel on synthetic data, each checked against an fp64 oracle "
        "before it is timed, and writes those that are faster than the built-in ones. The file holds for GPUs of this "
        """kind and is used where asked for: scorer_options={"tuning": FILE}, or PLAID_TILEMAXSIM_TUNING=FILE.""",
    )
    tune.add_argument("--out", metavar="FILE", default="tuning.json", help="file to write (default: %(default)s)")
    tune.add_argument("--only", metavar="KERNELS", help="kernels to tune, as in dense,centroid,residual,pq")
    tune.add_argument(
        "--quick", action="store_true", help="only the shapes of a search with 32 tokens of 128 dimensions"
    )
    tune.set_defaults(command=_tune)

    serve = add_parser(
        "serve",
        description='Loads an index and its encoder and answers POST /search {"query": TEXT, "k": 10} with JSON; also '
        "GET /health, /metrics (Prometheus) and /openapi.json. Queries that come together are searched together. "
        "SIGTERM ends it once it has answered what it accepted. Needs pip install 'plaid-tilemaxsim[serve]'.",
        epilog=f"example: plaid-tilemaxsim {examples['serve']} and then "
        """curl -H 'Content-Type: application/json' -d '{"query": "what is MaxSim?", "k": 5}' """
        "http://127.0.0.1:8000/search",
    )
    serve.add_argument("index", metavar="INDEX", help="folder of the index")
    serve.add_argument("--checkpoint", help="ColBERT checkpoint (default: the one that the index names)")
    serve.add_argument("--collection", metavar="FILE.tsv", help='passages, for requests with {"text": true}')
    serve.add_argument("--scorer-options", type=_json_object, metavar="JSON", help="as in ColBERTConfig")
    serve.add_argument("--host", default="127.0.0.1", help="who reaches it can search (default: %(default)s)")
    serve.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: %(default)s)")
    for limit in dataclasses.fields(Limits):
        option, text = f"--{limit.name.replace('_', '-')}", f"{limit.metadata['help']} (default: %(default)s)"
        serve.add_argument(option, type=type(limit.default), default=limit.default, metavar="N", help=text)
    serve.set_defaults(command=_serve)

    add_parser("eval")  # its own parser answers
    env = add_parser("env")
    env.set_defaults(command=_env)
    return parser


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers with commas between them, got {text!r}")
    return counts


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:  # getaddrinfo takes it modulo 65536
        raise argparse.ArgumentTypeError(f"expected 0 .. 65535, got {text!r}")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _run(args: argparse.Namespace) -> int:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    is_module = args.module is not None or program[:1] == ["-m"]
    if is_module:
        program = program[1:] if args.module is None else args.module
    if not program:
        args.usage_error("expected a script, or -m and a module")
    if not is_module and not os.path.isfile(program[0]):
        args.usage_error(f"expected a Python file, got {program[0]!r}")

    # colbert keeps the module __main__ that it sees when imported and asks it for its file name, and a spawned
    # child imports that file again: so the program's module must be in place before the plugin imports colbert.
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    if is_module:
        sys.path.insert(0, os.getcwd())
        try:
            code = _module_code(program[0], main_module)
        except (ImportError, ValueError) as error:
            args.usage_error(str(error))
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))
        main_module.__file__ = program[0]
        with io.open_code(program[0]) as file:
            code = compile(file.read(), program[0], "exec", dont_inherit=True)
    sys.argv = [str(main_module.__file__), *program[1:]]

    from plaid_tilemaxsim import enable

    try:
        enable(scorer=args.scorer, scorer_options=args.scorer_options)
    except ValueError as error:
        args.usage_error(str(error))
    exec(code, vars(main_module))
    return 0


def _module_code(name: str, main_module: types.ModuleType) -> types.CodeType:
    """The code that ``python -m name`` would run, with ``main_module`` made to look as it would there."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ValueError(f"-m: expected a module that can be run, got {name!r}")
    main_module.__spec__ = spec
    main_module.__loader__ = loader
    main_module.__package__ = spec.parent
    main_module.__file__ = spec.origin
    return cast(types.CodeType, code)


def _inspect(args: argparse.Namespace) -> int:
    from plaid_tilemaxsim.index.placement import describe

    text, problems = describe(args.index, args.verify)
    print(text)
    for problem in problems:
        print(f"plaid-tilemaxsim: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _pq(args: argparse.Namespace) -> int:
    from plaid_tilemaxsim.index.files import read_index
    from plaid_tilemaxsim.index.pq import write_pq

    index = read_index(args.index)
    file = write_pq(index, args.m, opq=args.opq, sample=args.sample, seed=args.seed, force=args.force, progress=True)
    print(f"{file}: {args.m} bytes a token, {index.num_tokens * args.m:,} bytes of codes")
    return 0


def _shard(args: argparse.Namespace) -> int:
    from plaid_tilemaxsim.index.split import split_index

    out = args.out or os.path.normpath(args.index) + ".shards"
    manifest = split_index(args.index, args.n, out)
    for one in manifest.shards:
        last = one.first_pid + one.num_passages - 1
        print(f"{manifest.path / one.folder}: passages {one.first_pid:,} to {last:,}, {one.num_tokens:,} tokens")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from plaid_tilemaxsim.plan import describe

    print(describe(**{name: value for name, value in vars(args).items() if name != "command"}))
    return 0


def _warmup(args: argparse.Namespace) -> int:
    import time

    import torch

    from plaid_tilemaxsim.config import ScorerConfig
    from plaid_tilemaxsim.engine import with_defaults
    from plaid_tilemaxsim.engines import Engines

    options = ScorerConfig.from_options(args.scorer_options)
    engines = Engines(args.index, torch.cuda.is_available())
    engine, _ = engines.get(options)
    where = str(engine.device) if options.devices is None else ", ".join(options.devices)
    for k in args.k:
        params = with_defaults(k, mode=options.mode, prefilter=options.prefilter, query_maxlen=args.query_maxlen)
        began = time.perf_counter()
        engine.warmup(args.query_maxlen, params, batch=True)
        compiled = time.perf_counter()
        engine.warmup(args.query_maxlen, params)
        milliseconds = (time.perf_counter() - compiled) * 1e3 / options.replicas
        print(f"k={k}: ready after {compiled - began:.1f} s; a search takes {milliseconds:.2f} ms on {where}")
    engines.close()
    return 0


def _tune(args: argparse.Namespace) -> int:
    import torch

    from plaid_tilemaxsim import tuner

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    only = set(args.only.split(",")) if args.only else None
    table = tuner.tune(device, only, args.quick, report=lambda line: print(line, flush=True))
    tuner.write(args.out, table)
    print(f"{args.out}: {len(table['entries'])} choices for {table['gpu']}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    limits = Limits(**{limit.name: getattr(args, limit.name) for limit in dataclasses.fields(Limits)})
    from plaid_tilemaxsim import serve

    logging.basicConfig(format="%(message)s")
    logging.getLogger("plaid_tilemaxsim").setLevel(logging.INFO)  # how far loading is

    def load() -> serve.FastAPI:
        searcher, texts = serve.open_searcher(
            args.index, checkpoint=args.checkpoint, collection=args.collection, scorer_options=args.scorer_options
        )
        return serve.create_app(searcher, limits, texts)

    serve.serve(load, args.host, args.port)
    return 0


def _eval(words: Sequence[str]) -> int:
    """The evaluation: `eval/` of the checkout that this package lies in, else what the wheel installed beside it."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    name = "plaid_tilemaxsim_eval"
    if os.path.isfile(os.path.join(root, "eval", "cli.py")):
        sys.path.insert(0, root)
        name = "eval"
    status: int = importlib.import_module(f"{name}.cli").main(words, "plaid-tilemaxsim eval")
    return status


def _env(args: argparse.Namespace) -> int:
    from plaid_tilemaxsim.environment import environment

    for name, value in environment().items():
        print(f"{name:<14} {value}")
    return 0
