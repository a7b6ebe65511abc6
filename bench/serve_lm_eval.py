"""lm-eval (pip install 'lm-eval[api]' transformers) against `dsv4 serve` on a small task of its own.

python -m bench.serve_lm_eval [--lm-eval PATH]: starts a server on the embedded model, lets lm-eval's
OpenAI-style backend choose between continuations by their log-probabilities, in batches, and compares what it
reports with the engine's own scores. The last line is JSON.
"""

import argparse
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.models import EMBEDDED

ROOT = Path(__file__).parents[1]
TASK = """
task: dsv4_endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: right
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
STARTS = {
    "Once upon a": ["time there was a little girl.", "seven the by of green."],
    "The dog ran to the": ["park and played with a ball.", "and or but if."],
    "Mom said,": ['"It is time to go to bed."', "table window seven under."],
    "They lived happily": ["ever after.", "spoon before."],
    "The bird flew up into the": ["sky.", "yesterday."],
    "He was very hungry, so he ate an": ["apple.", "cloudy."],
    "She was sad because she lost her": ["toy.", "quickly."],
    "Tom and Lily like to": ["play together.", "the of a."],
}


def start_server(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    command = [sys.executable, "-m", "dsv4", "serve", "--port", "0", "--max-context", "1024"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file)
    for _ in range(600):
        if found := re.search(r"ready at http://127\.0\.0\.1:(\d+)/v1", log.read_text()):
            return process, int(found[1])
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lm-eval", default="lm_eval")
    lm_eval = parser.parse_args().lm_eval
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        docs = [{"start": s, "endings": e, "right": 0} for s, e in STARTS.items()]
        (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / "task.yaml").write_text(TASK.format(file=folder / "docs.jsonl"))
        process, port = start_server(folder / "log.txt")
        try:
            where = f"model=tiny,base_url=http://127.0.0.1:{port}/v1/completions,num_concurrent=2"
            options = f"{where},tokenizer={EMBEDDED},tokenizer_backend=huggingface"
            command = [lm_eval, "run", "--model", "local-completions", "--model_args", options]
            command += ["--tasks", "dsv4_endings", "--include_path", str(folder), "--batch_size", "4"]
            command += ["--log_samples", "--output_path", str(folder / "out")]
            subprocess.run(command, check=True, timeout=300)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(40)
        (result,) = (folder / "out").rglob("results_*.json")
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        accuracy = json.loads(result.read_text())["results"]["dsv4_endings"]["acc,none"]
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
    engine = Engine.load(config=EngineConfig(max_context=256, max_batch=1))
    assert engine.tokenizer is not None
    worst = 0.0
    for row in rows:
        for ending, (value, _) in zip(row["doc"]["endings"], row["filtered_resps"], strict=True):
            start = engine.tokenizer.encode_text(row["doc"]["start"])
            ids = engine.tokenizer.encode_text(f"{row['doc']['start']} {ending}")
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            scored = engine.generate([ids], params)[0].prompt
            want = math.fsum(token.logprob or 0.0 for token in scored[len(start) - 1 :])
            worst = max(worst, abs(want - float(value)))
    assert worst < 1e-3, f"lm-eval's log-likelihoods differ from the engine's by up to {worst}"
    print(json.dumps({"task": "dsv4_endings", "documents": len(rows), "accuracy": accuracy, "worst": worst}))


if __name__ == "__main__":
    main()
