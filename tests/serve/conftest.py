"""One server for all tests that need nothing else of it, and the support module on the path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

from serve_support import Server  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("serve"), "--max-batch", 3, "--max-queue", 3, "--isolate-by-key"
    ) as running:
        yield running
