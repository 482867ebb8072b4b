"""Stands in for ``vllm serve``: the routes that the tests ask for, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    closed = 0

    def _answer(self, body: str, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self.path == "/metrics":
            text = (
                "# HELP vllm:busy Requests.\n# TYPE vllm:busy gauge\n"
                f'vllm:busy{{engine="0"}} {os.getpid()}\n'
                "# HELP vllm:closed Connections closed early.\n# TYPE vllm:closed counter\n"
                f"vllm:closed_total {Handler.closed}\n"
            )
            return self._answer(text, kind="text/plain")
        if self.path == "/health":
            return self._answer("")
        return self._answer(json.dumps({"path": self.path, "pid": os.getpid()}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("wrong"):
            return self._answer(json.dumps({"error": "wrong"}), 400)
        if not body.get("stream"):
            return self._answer(json.dumps({"pid": os.getpid(), "body": body}))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for index in range(body["pieces"]):
                piece = f"data: {index} {time.time()}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                time.sleep(0.3)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            Handler.closed += 1
        return None

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
