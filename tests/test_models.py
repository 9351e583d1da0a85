"""`make models`: what is fetched, what is made, and how it ends where nothing can be fetched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dotenv import dotenv_values

from memgw.app import create_cli
from memgw.config import ROOT, Config
from memgw.qmd import QmdCli
from tests.actors import processes_with, until

EMBED = "hf_ggml-org_embeddinggemma-300M-Q8_0.gguf"
GENERATE = "hf_tobil_qmd-query-expansion-1.7B-q4_k_m.gguf"
RERANK = "hf_ggml-org_qwen3-reranker-0.6b-q8_0.gguf"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Enough of this one to run the script, so that its .env is not ours."""
    folder = tmp_path / "checkout"
    for name in ("bin", "memgw"):  # these look for .env above themselves, through links too
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("qmd", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".env").write_text("# of a test\nGIT_REMOTE_URL=/nowhere\n")
    return folder


def make_models(checkout: Path, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(checkout / "bin" / "models.py"), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(checkout), "MEMGW_DATA_DIR": "", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def put(data: Path, *names: str) -> Path:
    folder = data / "qmd-cache" / "qmd" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


def qmd_that(folder: Path, script: str) -> str:
    """A qmd for MEMGW_QMD; it says what it was given."""
    path = folder / "qmd"
    path.write_text(
        "#!/bin/sh\n"
        'for role in EMBED GENERATE RERANK; do eval "echo $role=\\$QMD_${role}_MODEL"; done\n'
        'echo "models in $XDG_CACHE_HOME"; echo "argv $*"\n' + script + "\n"
    )
    path.chmod(0o755)
    return str(path)


def test_a_hub_that_never_answers_ends_in_one_line(checkout: Path, tmp_path: Path) -> None:
    qmd = qmd_that(tmp_path, "sleep 100 & wait")
    done = make_models(checkout, MEMGW_QMD=qmd, PATIENCE="1")
    assert done.returncode == 1
    assert done.stderr == (
        "models: nothing came from the model hub for 1 seconds. "
        "Without a model hub there is a small model for English: make models MODEL=minilm\n"
    )
    assert until(lambda: not processes_with(str(checkout)))


def test_a_download_that_goes_on_is_waited_for(checkout: Path, tmp_path: Path, data: Path) -> None:
    folder = put(data)
    qmd = qmd_that(tmp_path, f"for n in 1 2 3 4 5; do head -c 9000 /dev/zero >> {folder}/m.ipull; sleep 0.5; done")
    done = make_models(checkout, MEMGW_QMD=qmd, MEMGW_DATA_DIR=str(data), PATIENCE="1.5")
    assert (done.returncode, done.stderr) == (0, "")


def test_qmd_failing_is_told(checkout: Path, tmp_path: Path) -> None:
    done = make_models(checkout, MEMGW_QMD=qmd_that(tmp_path, "exit 3"))
    assert done.returncode == 1
    assert done.stderr.startswith("models: qmd could not fetch them (exit 3, see above). Without a model hub")


def test_only_what_is_missing_is_fetched(checkout: Path, tmp_path: Path, data: Path) -> None:
    """Of a model that it has, qmd would delete the file when it can't reach the hub."""
    folder = put(data, GENERATE, f"{RERANK}.ipull")
    done = make_models(checkout, MEMGW_QMD=qmd_that(tmp_path, ""), MEMGW_DATA_DIR=str(data))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"models: generate: {folder / GENERATE} is here",
        "EMBED=hf:ggml-org/embeddinggemma-300M-GGUF/embeddinggemma-300M-Q8_0.gguf",
        f"GENERATE={folder / GENERATE}",
        "RERANK=hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF/qwen3-reranker-0.6b-q8_0.gguf",
        f"models in {data / 'qmd-cache'}",
        "argv --index models pull",
    ]


def test_nothing_is_asked_of_anybody_when_all_are_here(checkout: Path, tmp_path: Path, data: Path) -> None:
    put(data, EMBED, GENERATE, RERANK)
    done = make_models(checkout, MEMGW_QMD=qmd_that(tmp_path, "exit 3"), MEMGW_DATA_DIR=str(data))
    assert done.returncode == 0
    assert "argv" not in done.stdout


def test_a_file_of_the_operators_can_not_be_fetched(checkout: Path, tmp_path: Path) -> None:
    done = make_models(checkout, MEMGW_QMD=qmd_that(tmp_path, ""), QMD_EMBED_MODEL_URI="models/mine.gguf")
    assert done.returncode == 1
    assert done.stderr == "models: embed: the file that .env names is not there\n"


def test_the_small_model_is_made_and_named_in_env_once(checkout: Path, minilm: Path) -> None:
    path = checkout / "data" / "models" / "minilm-l6-v2-q8_0.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy(minilm, path)  # making it is tested elsewhere
    done = make_models(checkout, "minilm")
    assert (done.returncode, done.stderr) == (0, "")
    assert "`make down up` has it used" in done.stdout
    said = (checkout / ".env").read_text()
    assert said.startswith("# of a test\nGIT_REMOTE_URL=/nowhere\n")
    named = dotenv_values(checkout / ".env")["QMD_EMBED_MODEL_URI"]
    assert named == "data/models/minilm-l6-v2-q8_0.gguf"
    again = make_models(checkout, "minilm")
    assert again.returncode == 0
    assert "already" in again.stdout
    assert (checkout / ".env").read_text() == said


def test_another_model_is_not_known(checkout: Path) -> None:
    done = make_models(checkout, "large")
    assert (done.returncode, done.stderr) == (2, "models: MODEL=large: must be minilm, or left out\n")


def cli(data: Path, **settings: str) -> QmdCli:
    return create_cli(Config.load({"GIT_REMOTE_URL": "/nowhere", "MEMGW_DATA_DIR": str(data), **settings}), {})


def test_qmd_leaves_room_for_its_own_two_tokens_in_a_short_model(data: Path, minilm: Path) -> None:
    environ = cli(data, QMD_EMBED_MODEL_URI=str(minilm)).host_env()
    assert (environ["QMD_EMBED_MODEL"], environ["QMD_EMBED_CONTEXT_SIZE"]) == (str(minilm), "510")
    assert "QMD_EMBED_CONTEXT_SIZE" not in cli(data).host_env()


def test_a_fetched_short_model_gets_its_room_too(data: Path, minilm: Path) -> None:
    folder = put(data)
    shutil.copy(minilm, folder / "hf_somebody_bge-small-zh.gguf")
    environ = cli(data, QMD_EMBED_MODEL_URI="hf:somebody/models/bge-small-zh.gguf").host_env()
    assert environ["QMD_EMBED_CONTEXT_SIZE"] == "510"
