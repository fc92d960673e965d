"""Routes for operators: health, metrics, reload, pages."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.operation import Handler, Operation
from sbert_infer.serve.http.reloading import Reloading
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import json_response
from sbert_infer.serve.wire.schemas import Health, PastMetrics, Reload, Reloaded

_PAGES = Path(__file__).parent / "pages"
_PARTS = re.compile(r'<link rel="stylesheet" href="(.+)">|<script src="(.+)"></script>')
# The pages are sent as one file each, and may talk to this server only.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_HTML = "text/html; charset=utf-8"


class Admin:
    """The handlers of these routes."""

    def __init__(self, models: Models, metrics: Metrics, access: Access, reloading: Reloading) -> None:
        self._models, self._metrics, self._access, self._reloading = models, metrics, access, reloading

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        unready = ("model_unavailable",)
        return [
            Operation("GET", "/health/live", "Health", "Is the process alive?", self.live, Health),
            Operation(
                "GET", "/health/ready", "Health", "Should it get requests?", self.ready, Health, problems=unready
            ),
            *(
                Operation("GET", path, "Health", "The same as /health/ready", self.ready, Health, problems=unready)
                for path in ("/health", "/ping")
            ),
            Operation("GET", "/metrics", "Operation", "For Prometheus", self.metrics, None, media_type=_PROMETHEUS),
            Operation(
                "GET", "/metrics/history", "Operation", "What the live page has plotted", self.history, PastMetrics
            ),
            Operation(
                "POST",
                "/admin/reload",
                "Operation",
                "Read models, keys and certificate again",
                self.reload,
                Reload,
                problems=("forbidden", "reload_failed"),
                note="Needs an admin key. Requests are served meanwhile; a bad file changes nothing.",
            ),
            Operation("GET", "/", "Pages", "The live page", self.page("live"), None, media_type=_HTML),
            Operation("GET", "/docs", "Pages", "The routes, to read", self.page("docs"), None, media_type=_HTML),
        ]

    async def live(self, request: Request) -> Response:
        """Respond, which shows that the event loop runs."""
        return json_response(Health("live"))

    async def ready(self, request: Request) -> Response:
        """Respond 200 if all models take calls and the server is not about to stop."""
        if self._models.ready:
            return json_response(Health("ready"))
        missing = ", ".join(model.name for model in self._models if not model.ready)
        reason = "the server is about to stop" if self._models.draining else f"not ready: {missing}"
        raise Problem("model_unavailable", reason, retry_after_s=1.0)

    async def metrics(self, request: Request) -> Response:
        """Show all metrics."""
        return Response(self._metrics.render(), headers={"content-type": _PROMETHEUS})

    async def history(self, request: Request) -> Response:
        """Show what some metrics were in the last quarter of an hour."""
        return json_response(self._metrics.history.read())

    async def reload(self, request: Request) -> Response:
        """Read keys, certificate and models again."""
        if not self._access.admin_keys:
            message = "reload over HTTP needs a server with admin keys (see --admin-key-file); or send SIGHUP"
            raise Problem("forbidden", message)
        if self._reloading.in_progress:
            raise Problem("reload_failed", "a reload is in progress: wait for it to end")
        await self._reloading.reload()
        done = [Reloaded(model.name, model.manifest.weights_sha256) for model in self._models]
        return json_response(Reload(done))

    @staticmethod
    def page(name: str) -> Handler:
        """Make the handler of a page, which is read from disk once, with its styles and scripts."""
        file = _PAGES / name / f"{name}.html"

        def inline(part: re.Match[str]) -> str:
            tag, path = ("style", part[1]) if part[1] else ("script", part[2])
            return f"<{tag}>\n{(file.parent / path).read_text(encoding='utf-8')}</{tag}>"

        text = _PARTS.sub(inline, file.read_text(encoding="utf-8")).encode()

        async def handler(request: Request) -> Response:
            return Response(text, headers={**_PAGE_HEADERS, "content-type": _HTML})

        return handler
