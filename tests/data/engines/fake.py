"""Stands for the binaries of an engine: prints what real ones were recorded to print, and measures nothing:
its rates are a function of the flags. Started under the binaries' names;
`spec.json` is beside it."""

import json
import os
import re
import sys
import time
from pathlib import Path

spec = json.loads((Path(sys.argv[0]).parent / "spec.json").read_text())
name, args = Path(sys.argv[0]).name, sys.argv[1:]
data, engine = Path(spec["data"]), spec["engine"]


def value(flag: str, otherwise: str) -> str:
    return args[len(args) - 1 - args[::-1].index(flag) + 1] if flag in args else otherwise


with (Path(sys.argv[0]).parent / "calls.jsonl").open("a") as log:
    seen = {k: v for k, v in os.environ.items() if k.startswith(("GGML_", "CUDA_"))}
    log.write(json.dumps({"name": name, "args": args, "env": seen}) + "\n")
if "--help" in args and name == spec.get("silent"):
    print("    llama-sweep-bench -m model.gguf -c 8192 -b 2048 -ub 512")
    sys.exit(1)
if "--help" in args:
    print((data / f"{engine}-{'bench' if name == 'llama-bench' else 'common'}.help").read_text())
    sys.exit(0)
if "--version" in args:
    known = re.split(r"[\s,]+", (data / f"{engine}-common.help").read_text())
    unlisted = data / f"{engine}.unlisted"
    known += unlisted.read_text().split() if unlisted.exists() else []
    unknown = [a for a in args if re.match("--?[A-Za-z]", a) and a not in known]
    if unknown:
        print(f"error: unknown argument: {unknown[0]}", file=sys.stderr)
        sys.exit(1)
if "--version" in args:
    print((data / f"{engine}.version").read_text(), file=sys.stderr)
    sys.exit(0)
for fault, reason in spec.get("quiet", {}).items():
    if name == "llama-bench" and fault in " ".join(args):
        print(f"{reason}\n" * ("-v" in args) + "main: error: failed to create context", file=sys.stderr)
        sys.exit(1)
for fault, text in spec.get("faults", {}).items():
    if fault in " ".join(args):
        if text == "hang":
            time.sleep(600)
        print(text, file=sys.stderr)
        if text.startswith("GGML_ASSERT"):
            os.abort()
        sys.exit(1)
if "-op" in args and value("-op", "").startswith("0,1,1,1,"):
    asked = len(value("-op", "").split(",")) // 2
    print("".join((data / f"{engine}.ops").read_text().splitlines(keepends=True)[:asked]), file=sys.stderr)
    sys.exit(0)
if name == "llama-sweep-bench":
    (Path(sys.argv[0]).parent / "swept.json").write_text(json.dumps(args))
    step, made = int(value("-ub", "512")), int(value("-n", "0"))
    rate = 2.0 if "-op" in args else 1.0
    for position in range(0, int(value("-c", "512")), step):
        row = json.loads((data / f"{engine}.sweep.jsonl").read_text().splitlines()[0])
        row |= {"pp": step, "tg": made, "n_kv": position, "t_pp": step / (4e5 * rate), "t_tg": made / 8e4}
        print(json.dumps(row), file=sys.stderr)
    sys.exit(0)
print(f"{name}: a log line on standard error", file=sys.stderr)
if name == "llama-server" and not spec.get("serves", True):
    sys.exit(0)  # how it was started is recorded
if name == "llama-server":
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    slots = threading.Semaphore(int(value("-np", "4")))
    room = int(value("-c", "0")) // (1 if "-kvu" in args else int(value("-np", "4")))
    ik = engine.startswith("ik")
    looks = iter(range(1 << 30))

    class Handler(BaseHTTPRequestHandler):
        """Each token takes a millisecond, and as many requests are answered at a time as there are slots.

        Statuses, events and errors have the form of the real servers.
        """

        def do_GET(self) -> None:
            if next(looks) == 0:  # the model is read after the port is open
                error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
                self._whole(503, {"error": error})
            else:
                self._whole(200, {"status": "ok", **({"slots_idle": 2, "slots_processing": 0} if ik else {})})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, most = len(body["prompt"]), min(body["max_tokens"], spec.get("most", 1 << 30))
            if prompt >= room and not ik:
                said = f"request ({prompt} tokens) exceeds the available context size ({room} tokens)"
                error = {"code": 400, "message": said, "type": "exceed_context_size_error"}
                self._whole(400, {"error": {**error, "n_prompt_tokens": prompt, "n_ctx": room}})
                return
            # The server of ik_llama.cpp cuts a prompt that is too long.
            read = min(prompt if prompt < room else room // 2, spec.get("reads", prompt))
            with slots:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for _ in range(most):
                    time.sleep(0.001)
                    self._say({"choices": [self._choice("x", None)]})
                if "dies" in spec:
                    print(spec["dies"], file=sys.stderr, flush=True)
                    os.abort()
            usage = {"completion_tokens": most, "prompt_tokens": read, "total_tokens": most + read}
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
            # The last event of these servers holds the usage, too, whether it was asked for or not.
            self._say({"choices": [self._choice("", "stop" if ik else "length")], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _choice(self, text: str, end: str | None) -> dict:
            return {"text": text, "index": 0, "logprobs": None, "finish_reason": end}

        def _whole(self, status: int, data: object) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _say(self, data: object) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((value("--host", ""), int(value("--port", "0"))), Handler).serve_forever()
if name == "llama-perplexity":
    lost = Path(sys.argv[0]).parent / "lost"  # how many runs still lose their statistics
    if "--kl-divergence" in args and lost.exists() and (left := int(lost.read_text())) > 0:
        lost.write_text(str(left - 1))
        print("chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence")
    elif "--kl-divergence" in args:
        kld = "0.000500" if spec.get("wrong", "-") in " ".join(args) else "0.000071"
        print(re.sub(r"(Mean +KLD: +)[0-9.]+", rf"\g<1>{kld}", (data / f"{engine}.kld").read_text()))
    else:
        Path(value("--kl-divergence-base", "")).write_bytes(b"_logits_")
    sys.exit(0)
ubatch, threads = int(value("-ub", "512")), int(value("-t", "4"))
rows = []
for key, tokens, rate in (
    ("n_prompt", int(value("-p", "0")), 400000.0 * (1.5 if ubatch == 64 else 1.0)),
    ("n_gen", int(value("-n", "0")), 80000.0),
):
    if tokens:
        rate = tokens / spec["seconds"] if "seconds" in spec else rate
        nanoseconds = [round(1e9 * tokens / rate * (1 + 0.001 * i)) for i in (3, 0, 1, 2)]
        row = json.loads((data / f"{engine}-bench.json").read_text())[0]
        row |= {
            "n_ubatch": spec.get("ran", ubatch), "n_threads": threads, "n_prompt": 0, "n_gen": 0, key: tokens,
            "samples_ns": nanoseconds, "samples_ts": [tokens / n * 1e9 for n in nanoseconds],
        }  # fmt: skip
        row["flash_attn"] = type(row["flash_attn"])(value("-fa", "1") in ("1", "on"))
        rows.append(row)
print("ggml_cuda_init: a log line on standard output")
print("[NCCL] a log line that begins with a bracket")
if "seconds" in spec:  # it takes the time that it tells, between a load and an end
    seen = Path(sys.argv[0]).parent / "seen"  # bytes of the output that were there at the newest look

    def go_on() -> None:
        while not seen.exists() or int(seen.read_text()) < os.fstat(1).st_size:
            time.sleep(0.005)

    go_on()
    time.sleep(spec["seconds"])
    for n, row in enumerate(rows):
        time.sleep(2 * spec["seconds"] + sum(row["samples_ns"]) / 1e9)  # warming up, and the samples
        print(("[\n" if n == 0 else ",\n") + json.dumps(row, indent=2), flush=True)
        go_on()
    print("]", flush=True)
    time.sleep(spec["seconds"])
else:
    print(json.dumps(rows, indent=2))
