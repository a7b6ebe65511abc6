"""Turns a model's name into its folder: known names, NAME@REVISION, repositories in the local hub cache."""

import re
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import CheckpointError
from dsv4.hub.cache import missing_files, snapshot

# name -> repository. Each is described at https://huggingface.co/REPOSITORY. DeepSeek's own releases: April,
# 31 July and 13 August 2026; NVIDIA's builds of them by ModelOpt: June and August 2026. Base: not instructed.
KNOWN = {
    "flash": "deepseek-ai/DeepSeek-V4-Flash",
    "flash-0731": "deepseek-ai/DeepSeek-V4-Flash-0731",
    "flash-base": "deepseek-ai/DeepSeek-V4-Flash-Base",
    "flash-nvfp4": "nvidia/DeepSeek-V4-Flash-NVFP4",
    "flash-0731-nvfp4": "nvidia/DeepSeek-V4-Flash-0731-NVFP4",
    "pro": "deepseek-ai/DeepSeek-V4-Pro",
    "pro-0813": "deepseek-ai/DeepSeek-V4-Pro-0813",
    "pro-base": "deepseek-ai/DeepSeek-V4-Pro-Base",
    "pro-nvfp4": "nvidia/DeepSeek-V4-Pro-NVFP4",
    "pro-0813-nvfp4": "nvidia/DeepSeek-V4-Pro-0813-NVFP4",
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)


@dataclass(frozen=True)
class Name:
    """`text` is what the user wrote."""

    text: str
    repository: str
    revision: str

    @classmethod
    def parse(cls, text: str) -> "Name | None":
        """NAME or NAME@REVISION; None for what can only be a path."""
        name, at, revision = text.partition("@")
        repository = KNOWN.get(name.lower(), name)
        is_repository = _REPOSITORY.fullmatch(repository) and not re.search(r"\.\.|--", repository)
        if not is_repository or repository.endswith((".safetensors", ".json")):
            return None
        if at and (not _REVISION.fullmatch(revision) or ".." in revision):
            return None
        return cls(text, repository, revision or "main")


def short_name(repository: str) -> str:
    """The known name of a repository, else the repository."""
    return next((name for name, known in KNOWN.items() if known == repository), repository)


def resolve(model: Path) -> Path:
    """The folder of a model: a path that exists, or a name whose model lies in the local hub cache."""
    text = str(model)
    name = Name.parse(text)
    # A path into a folder that exists was meant as a path: the reader reports what is wrong with it.
    if model.exists() or name is None or ("/" in text and model.parent.exists()):
        return model
    folder = snapshot(name.repository, name.revision)
    if folder is None:
        raise CheckpointError(
            f"{text} is neither a folder nor in the local hub cache; fetch it with: dsv4 pull {text}"
        )
    if missing := missing_files(folder):
        raise CheckpointError(
            f"{text} is here only in part ({len(missing)} files are missing from {folder}, the first is "
            f"{missing[0]}); fetch the rest with: dsv4 pull {text}"
        )
    return folder
