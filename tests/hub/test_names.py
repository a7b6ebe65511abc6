"""Names of models: what is a name, where it leads, and what is listed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_model
from cli_support import completed, dsv4, ok

from dsv4.cli.options import complete_model
from dsv4.config import preset
from dsv4.errors import CheckpointError
from dsv4.hub import cache
from dsv4.hub.here import Room
from dsv4.hub.names import KNOWN, Name, resolve
from dsv4.models import embedded

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(repository: str, source: Path, *refs: str) -> Path:
    """A model in the hub cache."""
    folder = cache.folder_of(repository) / "snapshots" / COMMIT
    folder.parent.mkdir(parents=True)
    folder.symlink_to(source)
    for ref in refs:
        cache.set_revision(repository, ref, COMMIT)
    return folder


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("flash", KNOWN["flash"], "main"),
        ("Pro-NVFP4@v1", KNOWN["pro-nvfp4"], "v1"),
        ("someone/a.model_1-b", "someone/a.model_1-b", "main"),
        (f"someone/model@{COMMIT}", "someone/model", COMMIT),
        ("someone/model@refs/pr/1", "someone/model", "refs/pr/1"),
    ],
)
def test_names(text: str, repository: str, revision: str) -> None:
    assert Name.parse(text) == Name(text, repository, revision)


def test_names_of_the_hub_are_completed(tmp_path: Path) -> None:
    put(KNOWN["flash"], embedded(), "main", "v1")
    put("someone/own", embedded(), "main")
    (tmp_path / "hub" / "models--other--kind" / "snapshots" / COMMIT).mkdir(parents=True)
    cache.set_revision("other/kind", "main", COMMIT)
    assert complete_model("") == ["flash", "flash@v1", "someone/own"], "no other kind of model"
    assert completed("chat", "so", folder=tmp_path) == ["someone/own"]
    assert completed("plan", "fl", folder=tmp_path) == ["flash", "flash@v1"]
    assert set(completed("pull", "pro", folder=tmp_path)) == {
        name for name in KNOWN if name.startswith("pro")
    }


NO_NAMES = "/ flsh ../x a/../b a/b/c /tmp/x a/b@ a/b@../x a--b/c a/.b a/w.safetensors"


@pytest.mark.parametrize("text", NO_NAMES.split())
def test_what_is_no_name(text: str) -> None:
    assert Name.parse(text) is None


def test_known_names_are_repositories() -> None:
    for name, repository in KNOWN.items():
        assert Name.parse(name) == Name(name, repository, "main") and Name.parse(repository)
        assert not re.search(r"[/@]", name)


def test_a_folder_comes_before_a_name(tmp_path: Path) -> None:
    put(KNOWN["flash"], embedded(), "main", "v1")
    assert resolve(Path("flash")) == resolve(Path("flash@v1")) == resolve(Path(f"flash@{COMMIT}"))
    assert resolve(Path(KNOWN["flash"])).name == COMMIT
    (tmp_path / "flash").mkdir()
    assert resolve(Path("flash")) == Path("flash")


def test_what_is_not_here(tmp_path: Path) -> None:
    for name in ("pro", "someone/model", "someone/model@v2"):
        with pytest.raises(CheckpointError, match=f"fetch it with: dsv4 pull {name}$"):
            resolve(Path(name))
    put("someone/model", embedded())
    with pytest.raises(CheckpointError, match="dsv4 pull someone/model@v2"):
        resolve(Path("someone/model@v2"))
    (tmp_path / "someone").mkdir()
    assert resolve(Path("someone/mistyped")) == Path("someone/mistyped"), "meant as a path"


def test_a_ref_that_is_damaged_leads_nowhere() -> None:
    put("someone/model", embedded(), "main")
    (cache.folder_of("someone/model") / "refs" / "main").write_text("../../../etc")
    assert cache.snapshot("someone/model", "main") is None


def test_a_snapshot_has_its_repositorys_name() -> None:
    folder = cache.folder_of("someone/some-model") / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert cache.title(folder) == "some-model"
    assert cache.title(embedded()) == "tiny"


def test_commands_resolve_names() -> None:
    """One sentence from each command that takes a model."""
    said = "fetch it with: dsv4 pull someone/model"
    for command in ("chat", "eval", "inspect", "plan", "experts", "doctor", "compare"):
        done = dsv4(command, "someone/model")
        assert done.code == 2 and said in done.err, (command, done)
    assert said in dsv4("generate", "x", "--model", "someone/model").err
    assert said in dsv4("score", "someone/model", "--text", embedded() / "evalset.jsonl").err
    assert said in dsv4("quantize", "someone/model", "new", "--format", "nvfp4").err


def test_models_lists_what_is_here(tmp_path: Path) -> None:
    for style in ("official", "modelopt", "hf-bf16"):
        write_model(tmp_path / "made" / style, style, preset("tiny"))
    (tmp_path / "made" / "empty").mkdir()
    put(KNOWN["flash"], tmp_path / "made" / "official", "main")
    put("someone/model", tmp_path / "made" / "modelopt", "v2")
    found = json.loads(ok("models", "made", "--json"))["models"]
    assert [(m["name"], m["revision"], m["storage"], m["draft"]) for m in found] == [
        ("embedded", "", "nvfp4", "yes"),
        ("flash", "main", "mxfp4, fp8", "yes"),
        ("someone/model", "v2", "nvfp4, fp8", "yes"),
        ("hf-bf16", "", "bf16", "no"),
        ("modelopt", "", "nvfp4, fp8", "yes"),
        ("official", "", "mxfp4, fp8", "yes"),
    ]
    shown = ok("models", "made")
    assert "someone/model@v2" in shown and "on the CPU" in shown
    (tmp_path / "made" / "official" / "model.safetensors").unlink()
    assert "1 files are missing: dsv4 pull flash" in ok("models")


def test_models_reads_one_shard_of_an_index(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "data" / "golden" / "official"
    if not (golden / "config.json").exists():
        golden = write_model(tmp_path / "golden", "official", preset("tiny"))
    assert "mxfp4, fp8" in ok("models", golden.parent)


@pytest.mark.parametrize(
    ("gpus", "host", "words"),
    [
        ((), 100, "on the CPU"),
        ((), 60, "no"),
        ((80,), 10, "on 1 GPU"),
        ((60, 60), 10, "on 2 GPUs"),
        ((40, 20), 30, "with experts in host memory"),
        ((24,), 10, "no"),
    ],
)
def test_whether_it_fits(gpus: tuple[int, ...], host: int, words: str) -> None:
    room = Room(tuple(gpu << 30 for gpu in gpus), host << 30)
    assert room.verdict(60 << 30) == words


def test_neither_command_waits_for_torch() -> None:
    code = (
        "import sys; sys.argv = ['dsv4', 'models']; from dsv4.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import dsv4.hub.pull; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "clone", "official")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5368709120\n"
    (folder / "model.safetensors").write_text(pointer)
    err = dsv4("inspect", folder).err
    assert "is a Git LFS pointer, not the weights themselves; run git lfs pull" in err


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_CACHE": "$HOME/a"},
        {"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
        {"HF_HOME": "~/c"},
        {"XDG_CACHE_HOME": "/d"},
    ],
)
def test_the_cache_lies_where_the_hubs_library_has_it(variables: dict[str, str]) -> None:
    code = "import dsv4.env, huggingface_hub.constants as c; print(c.HF_HUB_CACHE, dsv4.env.hub_cache())"
    environment = {"HOME": "/home/someone", "PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    theirs, ours = done.stdout.split()
    assert theirs == ours, done.stderr


def test_two_processes_link_one_file(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is done just before this one makes its link."""
    file = ("nobody/small", COMMIT, "config.json", "hash")
    blob = cache.folder_of(file[0]) / "blobs" / "hash"
    blob.parent.mkdir(parents=True)
    blob.write_text("{}")
    make, others = Path.symlink_to, [file]

    def late(link: Path, target: Path) -> None:
        if others:
            cache.link(*others.pop())
        make(link, target)

    monkeypatch.setattr(Path, "symlink_to", late)
    cache.link(*file)
    snapshot = cache.folder_of(file[0]) / "snapshots" / COMMIT
    assert [(path.name, path.read_text()) for path in snapshot.iterdir()] == [("config.json", "{}")]
