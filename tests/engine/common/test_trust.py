"""Nothing of a model's folder is run, and what others may write there is said."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

import kedge.models.nano
from kedge.engine.common.folder_lock import lock_folder
from kedge.engine.common.model_folder import read_config
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model import loading
from kedge.errors import CorruptWeights, ModelNotFound, UnsupportedModel

SOURCE = Path(kedge.__path__[0])
CODE = "from pathlib import Path\nPath('ran').touch()\nclass Own: ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model with code in its folder; whoever is asked whether to run it says yes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    copied = shutil.copytree(Path(kedge.models.nano.__path__[0]), tmp_path / "model")
    (copied / "own.py").write_text(CODE)
    return copied


def mapped(file: Path, **more: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def test_every_call_of_transformers_forbids_code() -> None:
    calls = [
        node
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) >= 5
    for call in calls:
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert given.get("trust_remote_code") == "False", ast.unparse(call)


def test_a_tokenizers_code_is_not_run(folder: Path) -> None:
    mapped(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        HFTokenizer.load(folder)
    assert not Path("ran").exists()


def test_a_models_code_is_not_run(folder: Path) -> None:
    mapped(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    with pytest.raises(UnsupportedModel):
        read_config(folder)
    assert not Path("ran").exists()


def test_weights_that_are_pickled_are_refused(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CorruptWeights, match="no safetensors in it"):
        loading.load(folder, torch.float32, torch.device("cpu"))


def test_a_folder_that_others_may_write_to_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, is_told in ((0o700, False), (0o755, False), (0o777, True)):
        caplog.clear()
        path = tmp_path / oct(mode)
        path.mkdir()
        path.chmod(mode)
        lock_folder(path, "state")
        assert ("every user" in caplog.text) == is_told


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        lock_folder(tmp_path, "state")
    assert not (tmp_path / "elsewhere").exists()
