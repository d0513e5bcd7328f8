"""The routes of the endpoint, on starlette."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fewbits.errors import FewbitsError, InputError
from fewbits.inference.serving import protocol
from fewbits.inference.serving.protocol import Answer, Asked, RefusedError
from fewbits.inference.serving.turns import FullError, StoppedError, Turn, Turns
from fewbits.inference.text_model import Continuation, TextModel, TooLongError, chat_tokens, plain_tokens

_LARGEST = 8 << 20  # bytes of a request: more than any context holds
Loaded = tuple[TextModel, str, int]  # the model, its name, when it was loaded


def application(loaded: Loaded, turns: Turns, key: str | None = None) -> Starlette:
    """`key`: what clients must give as their API key."""
    model, name, created = loaded

    async def health(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"status": "ok", "model": name, **turns.counts()})

    async def models(request: Request) -> Response:
        _allowed(request, key)
        row = {"id": name, "object": "model", "created": created, "owned_by": "fewbits", "context": model.context}
        asked_for = request.path_params.get("model")
        if asked_for not in (None, name):
            raise RefusedError(404, f"there is no model `{asked_for}` here: `{name}` is served", "model", "model_not_found")
        return JSONResponse(row if asked_for else {"object": "list", "data": [row]})

    async def generate(request: Request) -> Response:
        _allowed(request, key)
        asked = protocol.parse(await _body(request), request.url.path.endswith("/chat/completions"), name)
        pending = _Pending(model, asked, turns)
        try:
            await pending.begun(request)
            if asked.stream:
                return StreamingResponse(pending.events(Answer(asked, name)), media_type="text/event-stream", headers=_UNBUFFERED)
            document = await pending.whole(Answer(asked, name))
            pending.left()
            return JSONResponse(document)
        except BaseException:
            pending.left()
            raise

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        await asyncio.to_thread(turns.close)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
        Route("/v1/chat/completions", generate, methods=["POST"]),
        Route("/v1/completions", generate, methods=["POST"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {FewbitsError: _refused, FullError: _full, HTTPException: _http, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=life)


_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _Pending:
    """A request in the queue, and what the thread has said of it so far."""

    def __init__(self, model: TextModel, asked: Asked, turns: Turns) -> None:
        self._loop, self._said, self._turns = asyncio.get_running_loop(), asyncio.Queue[Any](), turns
        self._continuation: Continuation | None = None
        self._watch: asyncio.Task[None] | None = None

        def work(cut: Callable[[], bool]) -> Iterator[Any]:
            self._continuation = Continuation(model, _tokens(model, asked), asked.limits, cut)
            yield ""  # the request can be answered
            yield from self._continuation

        self._turn = Turn(work, self._tell)
        try:
            turns.add(self._turn)
        except StoppedError:
            raise _stopping() from None

    def _tell(self, item: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._said.put_nowait, item)

    async def begun(self, request: Request) -> None:
        """Waits for its turn; what is wrong with the request is raised here, before anything is answered."""
        self._watch = asyncio.create_task(self._until_gone(request))
        await self._next()

    async def whole(self, answer: Answer) -> dict[str, Any]:
        while await self._next() is not None:
            pass
        continuation = self._ended()
        return answer.whole(continuation.text, continuation.ended, _usage(continuation))

    async def events(self, answer: Answer) -> AsyncIterator[str]:
        try:
            if first := answer.first():
                yield _event(first)
            while (text := await self._next()) is not None:
                yield _event(answer.piece(text))
            continuation = self._ended()
            yield _event(answer.last(continuation.ended))
            if answer.asked.usage_in_stream:
                yield _event(answer.usage(_usage(continuation)))
            yield "data: [DONE]\n\n"
        except FewbitsError as failure:  # the status is sent already
            yield _event(_as_refused(failure).to_dict())
        finally:
            self.left()

    def left(self) -> None:
        """The request is over, however it ended."""
        self._turns.withdraw(self._turn)
        if self._watch:
            self._watch.cancel()

    async def _next(self) -> str | None:
        item = await self._said.get()
        if isinstance(item, BaseException):
            raise item
        text: str | None = item
        return text

    async def _until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._turns.withdraw(self._turn)
        self._said.put_nowait(RefusedError(499, "the client has gone"))  # what waited in the queue gets no turn any more

    def _ended(self) -> Continuation:
        assert self._continuation is not None
        if self._continuation.ended == "cut":  # nobody but the server itself cuts off whom it still answers
            raise _stopping()
        return self._continuation


def _tokens(model: TextModel, asked: Asked) -> list[int]:
    if isinstance(asked.prompt, str):
        return plain_tokens(model.tokenizer, asked.prompt)
    if asked.chat:
        return chat_tokens(model.tokenizer, asked.prompt)  # type: ignore[arg-type]
    tokens: list[int] = asked.prompt  # type: ignore[assignment]
    if bad := [token for token in tokens if not 0 <= token < len(model.tokenizer)]:
        raise InputError(f"the vocabulary has {len(model.tokenizer)} tokens, and no token {bad[0]}")
    return tokens


def _usage(continuation: Continuation) -> dict[str, int]:
    return protocol.usage_of(len(continuation.prompt), len(continuation.tokens))


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RefusedError(415, "the body must be JSON: send `Content-Type: application/json`")  # also keeps other sites' forms out
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST:
            raise RefusedError(413, f"a request has at most {_LARGEST} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is not JSON") from None


def _allowed(request: Request, key: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise RefusedError(401, "the API key is missing or another one", None, "invalid_api_key")


def _stopping() -> RefusedError:
    return RefusedError(503, "the server is being stopped", None, "server_stopping")


def _as_refused(failure: FewbitsError) -> RefusedError:
    if isinstance(failure, RefusedError):
        return failure
    code = "context_length_exceeded" if isinstance(failure, TooLongError) else None
    return RefusedError(400 if isinstance(failure, InputError) else 500, failure.args[0], None, code)


async def _refused(request: Request, failure: Exception) -> Response:  # noqa: ARG001
    assert isinstance(failure, FewbitsError)
    refused = _as_refused(failure)
    return JSONResponse(refused.to_dict(), refused.status)


async def _full(request: Request, failure: Exception) -> Response:  # noqa: ARG001
    assert isinstance(failure, FullError)
    refused = RefusedError(429, f"{failure}: try again in {failure.seconds} s", None, "queue_full")
    return JSONResponse(refused.to_dict(), 429, {"Retry-After": str(failure.seconds)})


async def _http(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = {404: f"there is no {where}", 405: f"{where} is not allowed"}.get(failure.status_code, str(failure.detail))
    return JSONResponse(RefusedError(failure.status_code, message).to_dict(), failure.status_code, failure.headers)


async def _failed(request: Request, failure: Exception) -> Response:  # noqa: ARG001
    return JSONResponse(RefusedError(500, "generating failed: see the server's log").to_dict(), 500)
