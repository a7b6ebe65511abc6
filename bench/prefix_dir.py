"""Time to the first token of a long conversation after a restart, with and without its folder of prefixes.

    python -m bench.prefix_dir [tokens, 10000] [model folder, the embedded one]

Each run is a process of its own. Also: what writing behind costs the first run, and what the folder takes.
The last line is JSON.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import json, random, sys, time
from dsv4 import Engine, EngineConfig, SamplingParams
tokens, model, folder = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3] or None
config = EngineConfig(max_context=tokens + 64, max_batch=1, prefix_dir=folder)
began = time.perf_counter()
engine = Engine.load(model, config)
loaded = time.perf_counter() - began
chance = random.Random(1)
ids = [chance.randrange(5, engine.model_config.vocab_size) for _ in range(tokens)]
began = time.perf_counter()
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
stream = engine.stream(engine.request(ids, params))
first = next(iter(stream))
seconds = time.perf_counter() - began
done = stream.completion()
values = [(t.id, t.logprob) for t in done.tokens]
print(json.dumps({"load_s": loaded, "first_s": seconds, "cached": done.cached_tokens, "values": values,
                  "device": engine.settings.device.name, "notices": engine.notices}))
"""


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    model = sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as folder:

        def run(kept: str) -> dict[str, object]:
            command = [sys.executable, "-c", RUN, str(tokens), model, kept]
            return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

        without, cold, warm = run(""), run(folder), run(folder)
        files = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    assert without["values"] == cold["values"] == warm["values"], "a hit from disk is a miss, bit for bit"
    times = {name: one["first_s"] for name, one in (("without", without), ("cold", cold), ("warm", warm))}
    for name, seconds in times.items():
        print(f"{name:8} first token after {seconds:7.3f} s")
    ratio = times["without"] / times["warm"]  # type: ignore[operator]
    size = f"{len(files)} files, {sum(files) / 1e6:.1f} MB"
    print(f"{ratio:.1f} times sooner; {size}, {warm['cached']} tokens cached")
    assert ratio >= 5, "at least 5 times sooner is what --prefix-dir promises"
    result = {**times, "ratio": ratio, "bytes": sum(files), "tokens": tokens, "device": warm["device"]}
    print(json.dumps({**result, "load_without": without["load_s"], "load_with": warm["load_s"]}))


if __name__ == "__main__":
    main()
