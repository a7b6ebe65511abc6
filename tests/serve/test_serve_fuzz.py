"""A short run of bench/serve_fuzz.py: random bodies, none of them answered with a 5xx."""

from pathlib import Path

import pytest
from serve_support import Server


@pytest.mark.slow
def test_no_body_is_a_server_error(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from bench.serve_fuzz import fuzz

    with Server(tmp_path, "--max-batch", 8, "--max-context", 48) as server:
        counts = fuzz(server, 56, seed=3, seconds=120)
        assert counts["200"] > 8 and counts["400"] > 8, counts
        assert server.is_idle()
