"""colbert-ai beside today's libraries: adapted where needed, only there, and taken back."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import plaid_tilemaxsim
from plaid_tilemaxsim import compat
from tests.colbert_fixtures import checkpoint, collection  # noqa: F401

compat.allow_missing_git()

import transformers  # noqa: E402
from colbert.infra import ColBERTConfig  # noqa: E402
from colbert.modeling.checkpoint import Checkpoint  # noqa: E402
from colbert.modeling.colbert import ColBERT  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

NEEDED = int(transformers.__version__.split(".")[0]) >= 5


@pytest.fixture(autouse=True)
def reverted():
    compat.revert()
    yield
    compat.revert()


def python(source: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


class TestTransformers:
    @pytest.mark.skipif(not NEEDED, reason="transformers 4 needs nothing")
    def test_a_model_fails_without_and_loads_with(self, checkpoint):  # noqa: F811
        def embed():
            model = Checkpoint(str(checkpoint), ColBERTConfig(checkpoint=str(checkpoint)), verbose=1)
            return model.queryFromText(["bana bari"])

        with pytest.raises(AttributeError, match="all_tied_weights_keys"):
            embed()
        compat.adapt_transformers()
        first = embed()
        assert first.shape == (1, 32, 64)
        assert torch.equal(embed(), first), "the projection must come from the checkpoint, not from a new model"

    @pytest.mark.skipif(NEEDED, reason="transformers 5 needs it")
    def test_version_4_is_left_alone(self):
        before = PreTrainedModel.init_weights
        compat.adapt_transformers()
        assert PreTrainedModel.init_weights is before

    def test_idempotent_and_reversible(self):
        before = PreTrainedModel.init_weights
        compat.adapt_transformers()
        during = PreTrainedModel.init_weights
        compat.adapt_transformers()
        assert PreTrainedModel.init_weights is during
        assert compat.transformers_adapted() is NEEDED
        compat.revert()
        assert PreTrainedModel.init_weights is before
        assert not compat.transformers_adapted()

    @pytest.mark.skipif(not NEEDED, reason="transformers 4 needs nothing")
    def test_says_when_it_cannot(self, monkeypatch):
        monkeypatch.setattr(PreTrainedModel, "post_init", lambda self: None)
        before = PreTrainedModel.init_weights
        with pytest.raises(ValueError, match=r"transformers .* cannot be adapted.*expected post_init.*install"):
            compat.adapt_transformers()
        assert PreTrainedModel.init_weights is before
        with pytest.raises(ValueError, match="cannot be adapted"):
            plaid_tilemaxsim.enable()
        assert not plaid_tilemaxsim.is_enabled()

    @pytest.mark.skipif(not NEEDED, reason="transformers 4 needs nothing")
    def test_newer_than_tested_warns(self, monkeypatch, caplog):
        monkeypatch.setattr(compat, "transformers_version", lambda: ("6.0.1", 6))
        compat.adapt_transformers()
        assert "transformers 6.0.1 is newer than any version tested" in caplog.text

    def test_a_library_that_needs_nothing_is_left_alone(self, monkeypatch):
        monkeypatch.setattr(compat, "_loses_tied_keys", lambda: False)
        before = PreTrainedModel.init_weights
        compat.adapt_transformers()
        assert PreTrainedModel.init_weights is before


class TestGit:
    def test_import_without_git(self, tmp_path):
        """PATH names an empty folder, as on a machine that has no git."""
        environment = {"PATH": str(tmp_path), "GIT_PYTHON_REFRESH": "", "GIT_PYTHON_GIT_EXECUTABLE": ""}
        bare = "import os; del os.environ['GIT_PYTHON_REFRESH'], os.environ['GIT_PYTHON_GIT_EXECUTABLE']\n"
        assert "Bad git executable" in python(bare + "import git", **environment).stderr
        done = python(
            bare + "import plaid_tilemaxsim as p; p.enable(); import colbert; p.disable(); "
            "print(os.environ.get('GIT_PYTHON_REFRESH'))",
            **environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("None")

    def test_git_or_a_choice_of_the_user_is_left_alone(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "git", raising=False)
        for found, variable in ((True, None), (False, "raise")):
            monkeypatch.setattr(compat, "git_found", lambda found=found: found)
            monkeypatch.delenv("GIT_PYTHON_REFRESH", raising=False)
            if variable:
                monkeypatch.setenv("GIT_PYTHON_REFRESH", variable)
            compat.allow_missing_git()
            assert os.environ.get("GIT_PYTHON_REFRESH") == variable


@pytest.mark.skipif(torch.cuda.is_available(), reason="stock compiles nothing of this with a GPU")
class TestMaxsimExtension:
    @pytest.fixture(autouse=True)
    def unloaded(self, monkeypatch):
        for name in ("loaded_extensions", "segmented_maxsim"):
            monkeypatch.delattr(ColBERT, name, raising=False)

    def test_models_compile_nothing(self, checkpoint, monkeypatch):  # noqa: F811
        def compiler(**arguments):
            raise AssertionError("compiles an extension")

        monkeypatch.setattr("colbert.modeling.colbert.load", compiler)
        compat.apply()
        Checkpoint(str(checkpoint), ColBERTConfig(checkpoint=str(checkpoint)), verbose=1)
        with pytest.raises(AssertionError, match="compiles an extension"):
            ColBERT.segmented_maxsim(torch.zeros(1, 1), torch.ones(1))
        compat.revert()
        with pytest.raises(AssertionError, match="compiles an extension"):
            ColBERT.segmented_maxsim(torch.zeros(1, 1), torch.ones(1))

    def test_loads_when_called(self):
        compat.apply()
        scores, lengths = torch.tensor([[1.0, 2.0], [3.0, 1.0], [4.0, 4.0]]), torch.tensor([2, 1])
        for _ in range(2):
            assert ColBERT.segmented_maxsim(scores, lengths).tolist() == [5.0, 8.0]
        compat.revert()
        assert ColBERT.loaded_extensions
        assert ColBERT.segmented_maxsim(scores, lengths).tolist() == [5.0, 8.0]

    def test_unused_leaves_nothing(self):
        before = dict(vars(ColBERT))
        compat.apply()
        compat.apply()
        compat.revert()
        assert dict(vars(ColBERT)) == before
