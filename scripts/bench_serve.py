"""`plaid-tilemaxsim serve` under load on loopback: latency, throughput, and whether every answer is a direct search's.

    python scripts/bench_serve.py --index INDEX --checkpoint CHECKPOINT --queries queries.jsonl --out cpu_serve.json
    python scripts/bench_serve.py --index idx/msmarco-size --passages 8841823 --checkpoint random \
        --scorer-options '{"encoder": "fast"}' --clients 1 16 64 --out eval/results/h200_serve.json

Without --index: a small index and checkpoint, made at once. --checkpoint random: one of BERT-base's size whose
encodings lie where the index's centroids lie. Without --queries: random words of the checkpoint's vocabulary. First
every query is searched directly, by a Searcher in this process; then a server of its own answers them over HTTP.
Clients are closed loops: each sends its next query when its last is answered. A time is a client's, from the first
byte sent to the last byte parsed; serve_* figures are those of the last number of clients, serve_*_clientsN of each.
Means of a batch by the server's metrics: its queries (batch_mean), how long its first one waited (wait_ms), the host's
part in encoding it (encode_ms), its search with what is left of encoding on a GPU (search_ms). One batch may be
encoded while another is searched, so that they come more often than the sum of their times says.

The run is correct if there was no error, every request for scores of given pids got the direct ones, and searches
found the direct results outside ties, but for a share of 1 - LEAST_AGREEMENT on a GPU: there fp16 encoding rounds
otherwise in a batch than alone, and a query token whose two best cells are that close probes another one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.latency import summary
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.metrics import NAMESPACE
from plaid_tilemaxsim.serve import open_searcher
from scripts.ab_latency import conclude, described, recorded
from scripts.bench_text import place
from scripts.make_synthetic_index import make_index as make_large_index
from tests.synthetic import make_checkpoint, make_index

ROOT = Path(__file__).resolve().parent.parent
# Largest difference of a score of 32 query tokens: encodings in fp32 differ in their last bits, those in fp16 by
# about 1e-3 of a token's similarity.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}
LEAST_AGREEMENT = {"cpu": 1.0, "cuda": 0.95}
Ranked = tuple[Sequence[int], Sequence[float]]


def agrees(got: Ranked, want: Ranked, tolerance: float) -> bool:
    """Whether two rankings are the same outside ties: position by position in scores, passage by passage in both."""
    (pids, scores), (wanted, expected) = got, want
    if len(pids) != len(wanted) or len(scores) != len(expected):
        return False
    of = dict(zip(wanted, expected))
    pairs = [*zip(scores, expected), *((score, of.get(pid, expected[-1])) for pid, score in zip(pids, scores))]
    return all(a == b or abs(a - b) <= tolerance for a, b in pairs)


@contextmanager
def server(index: Path, *options: str) -> Iterator[str]:
    """Address of a server process of its own, ended by SIGTERM; RuntimeError where it does not start or end well."""
    command = [sys.executable, "-W", "ignore", "-m", "plaid_tilemaxsim", "serve", str(index), "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = (re.match(r"http://\S+", line) for line in process.stdout)
        address = next((match for match in found if match), None)
        if address is None:
            raise RuntimeError(f"the server did not start: exit status {process.wait()}")
        yield address[0]
    finally:
        process.terminate()
        status = process.wait()
    if status:
        raise RuntimeError(f"the server ended with exit status {status}")


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, Any]:
    """One POST /search on a connection that stays: (status, parsed answer)."""
    head = (
        f"POST /search HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"\r\ncontent-length: *(\d+)", answer)
    assert length is not None
    content = await reader.readexactly(int(length[1]))
    return int(answer.split()[1]), json.loads(content)


async def load(address: str, requests: Sequence[Mapping[str, Any]], clients: int) -> list[tuple[int, Any, float]]:
    """(status, answer, milliseconds) of every request, sent by so many clients at once."""
    bodies = [json.dumps(request).encode() for request in requests]
    answers: list[tuple[int, Any, float]] = [(0, None, 0.0)] * len(bodies)
    todo = iter(range(len(bodies)))
    url = urlsplit(address)

    async def client() -> None:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        for i in todo:
            began = time.perf_counter()
            status, answer = await post(reader, writer, bodies[i])
            answers[i] = status, answer, (time.perf_counter() - began) * 1e3
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def totals(address: str) -> Mapping[str, float]:
    """The server's metrics by name, summed over their labels."""
    found: defaultdict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(NAMESPACE):
                name, value = re.sub(r"\{.*\}", "", line).removeprefix(f"{NAMESPACE}_").split()
                found[name] += float(value)
    return found


def of_a_batch(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Means over the batches between two ``totals``."""
    spent = {name: after[name] - before[name] for name in after}
    batches = spent["batch_queries_count"]
    parts = {f"{part}_ms": 1e3 * spent[f"{part}_seconds_sum"] / batches for part in ("wait", "encode", "search")}
    return {"batch_mean": spent["batch_queries_sum"] / batches, **parts}


def read_queries(path: Path) -> list[str]:
    """Texts of a .tsv (id, tab, text) or .jsonl ({"text": ...}) file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in lines]
    return [line.split("\t")[1] for line in lines]


def random_queries(searcher: Any, n: int) -> list[str]:
    words = sorted(word for word in searcher.checkpoint.query_tokenizer.tok.get_vocab() if word.isalpha())
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(n)]


def small_index(folder: Path) -> Path:
    """2,000 passages of random vectors, and a checkpoint of random weights."""
    checkpoint = make_checkpoint(folder / "small", dim=128, hidden=128)
    return make_index(folder / "index", n=2000, dim=128, C=512, mean_doclen=60, max_doclen=180, checkpoint=checkpoint)


def open_random(index: Path, folder: Path, layers: int, hidden: int, options: Mapping[str, Any]) -> Any:
    """A Searcher with a checkpoint of random weights, made in ``folder``, that encodes to where the centroids lie."""
    from safetensors.torch import save_file

    centroids = read_index(index, verify="structure").centroids
    bert = {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden, "vocab_size": 30522}
    make_checkpoint(folder, dim=centroids.size(1), hidden=hidden, layers=layers, **bert)
    searcher, _ = open_searcher(index, checkpoint=str(folder), scorer_options=options)
    place(searcher.checkpoint, centroids, random_queries(searcher, 50))
    weights = {name: tensor.cpu().contiguous() for name, tensor in searcher.checkpoint.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return searcher


def direct(searcher: Any, texts: Sequence[str], k: int, given: Sequence[int]) -> tuple[list[Ranked], list[Ranked], Any]:
    """Each query searched alone, and its scores of ``given``; and the times of the searches, in ms."""
    found, scored, times = [], [], []
    for text in texts:
        began = time.perf_counter()
        pids, _, scores = searcher.search(text, k=k)
        times.append((time.perf_counter() - began) * 1e3)
        found.append((pids, scores))
        pids, _, scores = searcher.search(text, k=len(given), pids=list(given))
        scored.append((pids, scores))
    return found, scored, times


def ranked(answers: Sequence[tuple[int, Any, float]]) -> list[Ranked]:
    """Rankings as a Searcher returns them: null stands for -inf, the score of an empty passage."""
    rows = [(answer.get("pids", ()), answer.get("scores", ())) for _, answer, _ in answers]
    return [(pids, [-math.inf if score is None else score for score in scores]) for pids, scores in rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, help="folder of an index (default: a small one)")
    parser.add_argument("--passages", type=int, help="make a synthetic index of so many where --index is missing")
    parser.add_argument("--checkpoint", help="a folder or `random` (default: the one that the index names)")
    parser.add_argument("--layers", type=int, default=12, help="of a random checkpoint")
    parser.add_argument("--hidden", type=int, default=768, help="of a random checkpoint")
    parser.add_argument("--queries", type=Path, help=".tsv or .jsonl (default: random words)")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=2000, help="for each number of clients (default: %(default)s)")
    parser.add_argument("--distinct", type=int, default=200, help="queries that they repeat (default: %(default)s)")
    parser.add_argument("--scorer-options", default="{}", metavar="JSON")
    parser.add_argument("--options", default="", help="more options of the server, as in '--max-batch 16'")
    parser.add_argument("--commit", help="of the source, where it is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)

    import torch

    where = "cuda" if torch.cuda.is_available() else "cpu"
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    problems: list[str] = []
    options = json.loads(args.scorer_options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.index and args.passages and not args.index.exists():
            make_large_index(args.index, passages=args.passages, device=where, progress=False)
        index = (args.index or small_index(folder)).resolve()
        checkpoint = args.checkpoint
        if checkpoint == "random":
            checkpoint = str(folder / "random")
            searcher = open_random(index, Path(checkpoint), args.layers, args.hidden, options)
        else:
            searcher, _ = open_searcher(index, checkpoint=checkpoint, scorer_options=options)
        passages, about = searcher.ranker.num_passages, described(index, read_index(index, verify="structure"))
        texts = read_queries(args.queries) if args.queries else random_queries(searcher, args.distinct)
        texts = texts[: args.distinct]
        given = random.Random(1).sample(range(passages), min(200, passages))
        direct(searcher, texts[:5], args.k, given)  # warm
        wanted, scored, times = direct(searcher, texts, args.k, given)
        searcher.ranker.close()
        figures["direct_p50_ms"] = statistics.median(times)
        detail["direct_ms"] = summary(times)

        gc.collect()
        gc.freeze()  # a full collection in this process would pass for a slow answer
        more = ["--scorer-options", args.scorer_options, *args.options.split()]
        more += ["--checkpoint", checkpoint] if checkpoint else []
        with server(index, *more) as address:
            errors, same, searches = 0, 0, 0
            for clients in args.clients:
                asked = [i % len(texts) for i in range(args.requests)]
                random.Random(clients).shuffle(asked)
                asyncio.run(load(address, [{"query": texts[i], "k": args.k} for i in asked[:100]], clients))  # warm
                before, began = totals(address), time.perf_counter()
                answers = asyncio.run(load(address, [{"query": texts[i], "k": args.k} for i in asked], clients))
                elapsed = time.perf_counter() - began
                errors += sum(status != 200 for status, _, _ in answers)
                good = [agrees(a, wanted[i], TOLERANCE[where]) for a, i in zip(ranked(answers), asked)]
                same, searches = same + sum(good), searches + len(good)
                times = [ms for _, _, ms in answers]
                spent = summary(times)
                values = {"p50_ms": spent["p50"], "p99_ms": spent["p99"], "qps": len(answers) / elapsed}
                values |= of_a_batch(before, totals(address))
                figures |= {f"serve_{name}_clients{clients}": value for name, value in values.items()}
                figures |= {f"serve_{name}": value for name, value in values.items()}
                detail[f"clients{clients}_ms"] = spent
                print(f"{clients} clients: {values}", flush=True)
            requests = [{"query": text, "k": len(given), "pids": given} for text in texts]
            answers = asyncio.run(load(address, requests, args.clients[-1]))
            errors += sum(status != 200 for status, _, _ in answers)
            exact = [agrees(a, b, TOLERANCE[where]) for a, b in zip(ranked(answers), scored)]
        gc.unfreeze()

    figures |= {"errors": errors, "agreement": same / searches, "pids_agreement": sum(exact) / len(exact)}
    if errors:
        problems.append(f"{errors} requests were not answered 200")
    if same < LEAST_AGREEMENT[where] * searches:
        problems.append(f"{searches - same} of {searches} searches differ from a direct search")
    if not all(exact):
        problems.append(f"{len(exact) - sum(exact)} of {len(exact)} requests with pids differ from direct scores")
    # The comparison must be able to fail: the answers to other queries are no answers.
    turned = [agrees(a, b, TOLERANCE[where]) for a, b in zip(ranked(answers[1:] + answers[:1]), scored)]
    if len(texts) > 1 and sum(turned) > len(turned) / 2:
        problems.append("answers to other queries pass the comparison")

    conclude(
        {
            "problems": problems,
            "figures": figures,
            "detail": detail,
            "index": about,
            "k": args.k,
            "requests": args.requests,
            "clients": args.clients,
            "scorer_options": options,
            **recorded(args.commit),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
