"""Programs of others that search through colbert-ai: they work with the flag, and find what a direct search finds.

RAGatouille runs in the interpreter that PLAID_TILEMAXSIM_RAGATOUILLE names, else in this one if it is installed.
PLAID_TILEMAXSIM_COLBERT_SERVER names the server.py of ColBERT's repository, which no package of it holds.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.colbert_fixtures import DIM, PASSAGES, checkpoint, collection, enabled, stock_extensions  # noqa: F401
from tests.synthetic import make_index

ROOT = Path(__file__).resolve().parent.parent
# Scores of up to a few hundred query tokens, ours in fp32 and stock's on a CPU, which add up in different orders.
TOLERANCE = 1e-3

RAG = """
    import json
    import sys

    import plaid_tilemaxsim
    from tests.synthetic import make_collection

    if __name__ == "__main__":
        plaid_tilemaxsim.enable(scorer="tilemaxsim")
        from ragatouille import RAGPretrainedModel

        checkpoint, root = sys.argv[1:]
        texts = make_collection(300)
        model = RAGPretrainedModel.from_pretrained(checkpoint, index_root=root)
        path = model.index(texts, document_ids=[f"d{i}" for i in range(300)], index_name="x", split_documents=False)

        rag = RAGPretrainedModel.from_index(path)
        first = rag.search(texts[3], k=3)
        searcher = rag.model.model_index.searcher
        assert type(searcher.ranker) is plaid_tilemaxsim.TileMaxSimScorer, type(searcher.ranker)
        assert searcher.ranker.serves(searcher.config)
        found = {}
        for scorer in ("tilemaxsim", "plaid"):
            searcher.configure(scorer=scorer)
            found[scorer] = [
                rag.search(texts[3], k=3),
                rag.search(" ".join(texts[:12]), k=300),  # RAGatouille lengthens query_maxlen, and lowers k to 300
                rag.search(texts[5], k=20, doc_ids=["d1", "d7", "d250"]),
                *rag.search(texts[10:14], k=10),
            ]
        assert first == found["tilemaxsim"][0]
        print(json.dumps({"found": found, "longest": searcher.config.query_maxlen}))
"""


def ragatouille() -> str:
    """The interpreter that has it; skips the test where there is none."""
    python = os.environ.get("PLAID_TILEMAXSIM_RAGATOUILLE")
    if not python and importlib.util.find_spec("ragatouille") is None:
        pytest.skip(
            "ragatouille is not installed; in an environment with this project: pip install ragatouille 'langchain<1' "
            "psutil, and PLAID_TILEMAXSIM_RAGATOUILLE names that environment's python"
        )
    return python or sys.executable


def same(got: list[tuple[int, float]], want: list[tuple[int, float]]) -> bool:
    """Whether two rankings of (pid, score) are the same outside ties."""
    of = dict(want)
    pairs = [(a, b) for (_, a), (_, b) in zip(got, want)]
    pairs += [(score, of.get(pid, want[-1][1])) for pid, score in got]
    return len(got) == len(want) and all(abs(a - b) <= TOLERANCE for a, b in pairs)


def test_ragatouille_searches_with_the_flag(checkpoint, tmp_path, stock_extensions):  # noqa: F811
    program = tmp_path / "rag.py"
    program.write_text(textwrap.dedent(RAG))
    command = [ragatouille(), "-W", "ignore", str(program), str(checkpoint), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    rankings = {
        scorer: [[(row["passage_id"], row["score"]) for row in rows] for rows in found]
        for scorer, found in result["found"].items()
    }
    assert [len(ranking) for ranking in rankings["tilemaxsim"][:3]] == [3, 300, 3]
    assert result["longest"] > 32
    assert all(map(same, rankings["tilemaxsim"], rankings["plaid"]))
    assert not any(map(same, rankings["tilemaxsim"][3:], rankings["plaid"][4:]))
    for rows in result["found"]["tilemaxsim"]:
        assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(row["document_id"] == f"d{row['passage_id']}" for row in rows)


# What ColBERT's server.py does, for machines without it: one Searcher, called by Flask's threads.
SERVER = """
    import os

    from colbert import Searcher
    from flask import Flask, request

    app = Flask(__name__)
    searcher = Searcher(index=os.environ["INDEX_NAME"], index_root=os.environ["INDEX_ROOT"])


    @app.get("/api/search")
    def answer():
        rows = zip(*searcher.search(request.args["query"], k=100))
        names = ("pid", "rank", "score", "text")
        top = [dict(zip(names, (*row, searcher.collection[row[0]]))) for row in rows]
        return {"query": request.args["query"], "topk": top[: int(request.args.get("k", 10))]}


    if __name__ == "__main__":
        app.run(port=int(os.environ["PORT"]))
"""


@pytest.mark.parametrize("whose", ["colbert", "ours"])
def test_flask_server_searches_with_the_flag(whose, checkpoint, collection, tmp_path, enabled):  # noqa: F811
    if whose == "ours":
        program = tmp_path / "server.py"
        program.write_text(textwrap.dedent(SERVER))
    else:
        named = os.environ.get("PLAID_TILEMAXSIM_COLBERT_SERVER")
        if not named:
            pytest.skip(
                "PLAID_TILEMAXSIM_COLBERT_SERVER names no server.py (of github.com/stanford-futuredata/ColBERT)"
            )
        program = Path(named)
    tsv = tmp_path / "collection.tsv"
    tsv.write_text("".join(f"{pid}\t{text}\n" for pid, text in enumerate(collection)))
    make_index(tmp_path / "x", n=PASSAGES, dim=DIM, common=2.0, checkpoint=checkpoint, collection=tsv)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "INDEX_ROOT": str(tmp_path), "INDEX_NAME": "x", "PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "-m", "plaid_tilemaxsim", "run", "--", str(program)]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        while "Running on" not in log.read_text():
            assert process.poll() is None, log.read_text()
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue

        def ask(text: str) -> list[dict]:
            query = urllib.parse.urlencode({"query": text, "k": 7})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/search?{query}", timeout=60) as answer:
                return json.load(answer)["topk"]

        texts = collection[:24]
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(ask, texts))
    finally:
        process.terminate()
        process.wait()

    from colbert import Searcher
    from colbert.infra import ColBERTConfig

    searcher = Searcher("x", index_root=str(tmp_path), config=ColBERTConfig(scorer="tilemaxsim"), verbose=1)
    wanted = [list(zip(*searcher.search(text, k=100)[::2]))[:7] for text in texts]
    found = [[(row["pid"], row["score"]) for row in rows] for rows in answers]
    assert all(map(same, found, wanted))
    assert not any(map(same, found, wanted[1:]))
    for rows in answers:
        assert [row["rank"] for row in rows] == list(range(1, 8))
        assert all(row["text"] == collection[row["pid"]] for row in rows)
