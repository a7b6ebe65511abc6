"""Folders: shards, their index, and files that change while they are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_both, read_file, refused, write_file

from dsv4.errors import CheckpointError
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import INDEX, Reader


def shard(originals: dict[str, Path], folder: Path) -> dict[str, str]:
    """The official model in two shards with an index; returns the index's map."""
    tensors = read_file(originals["official"] / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for file, part in (("model-00001-of-00002", names[::2]), ("model-00002-of-00002", names[1::2])):
        write_file(folder / f"{file}.safetensors", {name: tensors[name] for name in part})
        index |= dict.fromkeys(part, f"{file}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shards_load(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    shard(originals, folder)
    load_both(folder)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "../../x",
        "a/../" + ONE,
    ],
)
def test_index_pointing_outside_the_folder(file: str, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    index = shard(originals, folder)
    write_index(folder, index | {"embed.weight": file})
    refused(folder, INDEX, repr(file), "shards must lie beside the index")


@pytest.mark.parametrize(
    "file", ["model-00003-of-00003.safetensors", "nul\0.safetensors", "x" * 300, "\ud800"]
)
def test_index_naming_a_missing_shard(file: str, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    index = shard(originals, folder)
    write_index(folder, index | {"embed.weight": file})
    refused(folder, repr(file)[1:8])


def test_shard_gone(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    shard(originals, folder)
    (folder / TWO).unlink()
    refused(folder, TWO, "does not exist; the checkpoint is incomplete")
    (folder / INDEX).unlink()
    refused(folder, "the checkpoint is incomplete")


def test_tensor_in_two_shards(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    shard(originals, folder)
    one, two = read_file(folder / ONE), read_file(folder / TWO)
    name = sorted(one)[0]
    write_file(folder / TWO, two | {name: one[name]})
    refused(folder, repr(name), ONE, TWO, "keep the shards of one checkpoint only")
    (folder / INDEX).unlink()
    refused(folder, repr(name), ONE, TWO, "keep the shards of one checkpoint only")


def test_index_and_shards_disagree(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    index = shard(originals, folder)
    name = next(name for name, file in index.items() if file == ONE)
    write_index(folder, index | {name: TWO})
    refused(folder, repr(name), ONE, TWO, "different checkpoints")
    write_index(folder, {key: file for key, file in index.items() if key != name})
    refused(folder, repr(name), "not in", INDEX)
    write_index(folder, index | {"layers.9.attn_norm.weight": TWO})
    refused(folder, "'layers.9.attn_norm.weight'", TWO, "missing")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}'),
        *(
            '{"a":' * 50_000,
            '{"weight_map": {"a": "x", "a": "y"}}',
            '{"weight_map": {"a": ' + "9" * 5000 + "}}",
        ),
    ],
)
def test_index_that_is_no_index(text: str, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    shard(originals, folder)
    (folder / INDEX).write_text(text)
    refused(folder, INDEX, "again")


def test_two_checkpoints_in_one_folder(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    shard(originals, folder)
    (folder / "model.safetensors").write_bytes((originals["official"] / "model.safetensors").read_bytes())
    refused(folder, "model.safetensors", INDEX, "move one of the two")


def test_empty_and_absent_folders(tmp_path: Path, place: Callable) -> None:
    refused(place("official"), "model*.safetensors", "is this a model folder?")
    refused(tmp_path / "absent", "absent", "give a model folder")
    with pytest.raises(CheckpointError, match="absent does not exist; give a model folder"):
        Reader(tmp_path / "absent")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors", "cannot be read")


def test_file_cut_while_it_is_read(originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    raw = (originals["official"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw)
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was read"):
        checkpoint.load(dense=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        checkpoint.load(dense=True)
