"""A short run of tests/bench/serve_fuzz.py: random bodies, none of them answered with a 5xx."""

import sys
from pathlib import Path

import pytest
from serve_support import Server

sys.path[:0] = [str(Path(__file__).parents[1] / "bench")]


@pytest.mark.slow
def test_no_body_is_a_server_error(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from serve_fuzz import fuzz

    with Server(tmp_path, "--max-batch", 8, "--max-context", 48) as server:
        counts = fuzz(server, 56, seed=3, seconds=120)
        assert counts["200"] > 8 and counts["400"] > 8, counts
        assert server.is_idle()
