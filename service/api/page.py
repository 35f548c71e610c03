"""The chat page: static files that hold no data, served from a fixed list with a strict content policy."""

from hashlib import sha256
from pathlib import Path

from aiohttp import web

from kvstore.service.http.errors import ApiError, Route

WEB = Path(__file__).parent.parent / "web"
TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png",
    ".woff2": "font/woff2",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # the files change with the server
}


# What may be served, by its place below the folder; nothing else is, whatever a path says.
FILES = {path.relative_to(WEB).as_posix(): path for path in sorted(WEB.rglob("*")) if path.suffix in TYPES}


async def index(request: web.Request) -> web.Response:
    return _answer(request, "index.html")


async def static(request: web.Request) -> web.Response:
    return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    """A browser that has the same bytes already is told so: with the libraries they are nearly a megabyte."""
    path = FILES.get(name)
    if path is None:
        raise ApiError(404, "there is nothing at this path", code="not_found")
    body, kind = path.read_bytes(), TYPES[path.suffix]
    tag = sha256(body).hexdigest()
    headers = {**HEADERS, "ETag": f'"{tag}"'}
    if any(known.value == tag for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    charset = "utf-8" if kind.startswith("text/") else None
    return web.Response(body=body, content_type=kind, charset=charset, headers=headers)


ROUTES = (
    Route("GET", "/", index, "public", "The chat page.", tag="page"),
    Route("GET", "/web/{name:.+}", static, "public", "Its files.", tag="page"),
)
